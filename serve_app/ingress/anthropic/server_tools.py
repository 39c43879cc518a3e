"""Tools that Anthropic's own servers run.

Agents declare them with every request, needed or not. Nothing here runs them, so that models are not shown
them, and cannot call them. Tools that a client runs itself by a type alone (`bash_…`, `text_editor_…`,
`computer_…`, `memory_…`) are no such tools: without a schema, no model here could write their calls.

Source: Anthropic's API reference, "Tools".
"""

from __future__ import annotations

import re

from pydantic import BeforeValidator

_TYPES = re.compile(
    r"(?:web_search|web_fetch|code_execution|tool_search_tool_(?:regex|bm25))_[0-9]{8}"
)


def _without_server_tools(tools: object) -> object:
    return [one for one in tools if not _is_one(one)] if isinstance(tools, list) else tools


def _is_one(tool: object) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and _TYPES.fullmatch(kind) is not None


WITHOUT_SERVER_TOOLS = BeforeValidator(_without_server_tools)
"""Leaves them out of `tools`."""
