"""A chat template's capabilities, in llama-server's words (`chat_template_caps`): found by trying.

Source: llama.cpp, common/jinja/caps.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_app.errors import InvalidRequestError

Render = Callable[
    [Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], Mapping[str, Any]], str
]
"""Messages, tools and more variables as a prompt. Raises InvalidRequestError."""

_TEXT, _TOOL, _FIRST, _SECOND, _VALUE = "Wzqa", "wzqb", "wzqc", "wzqd", "wzqe"
"""Words that no template has."""
_KEY = re.compile(r"['\"]type['\"]:")
_ASKED = {"role": "user", "content": "Hello"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A tool",
            "parameters": {
                "type": "object",
                "properties": {"arg": {"type": "string", "description": "An argument"}},
                "required": ["arg"],
            },
        },
    }
]
# Variables by which templates are told to leave reasoning where it is.
_KEEP = {
    "enable_thinking": True,
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}


_NOTHING: Mapping[str, Any] = {}


def found(render: Render, names: frozenset[str]) -> dict[str, bool]:
    """Of a template that reads variables of these names."""

    def told(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        extra: Mapping[str, Any] = _NOTHING,
    ) -> str:
        try:
            return render(messages, tools, extra)
        except InvalidRequestError:
            return ""

    parts = told([{"role": "user", "content": [{"type": "text", "text": _TEXT}]}])
    one = told(_called({"arg": _VALUE}, _FIRST), _TOOLS)
    takes_objects = _VALUE in one
    arguments = {"arg": _VALUE} if takes_objects else f'{{"arg": "{_VALUE}"}}'
    one = one if takes_objects else told(_called(arguments, _FIRST), _TOOLS)
    two = told(_called(arguments, _FIRST, _SECOND), _TOOLS)
    past = [_ASKED, _answered(_TEXT), _ASKED, _answered("Hm"), _ASKED]
    return {
        "supports_string_content": _TEXT in told([_ASKED | {"content": _TEXT}]),
        # What is no text may be printed as Python or JSON have it.
        "supports_typed_content": _TEXT in parts and not _KEY.search(parts),
        "supports_tools": _TOOL in one or _TOOL in told([_ASKED], _TOOLS),
        "supports_tool_calls": _FIRST in one,
        "supports_parallel_tool_calls": _SECOND in two,
        "supports_system_role": _TEXT in told([{"role": "system", "content": _TEXT}, _ASKED]),
        "supports_preserve_reasoning": _TEXT in told(past, extra=_KEEP),
        "supports_reasoning_effort": not names.isdisjoint(
            ("reasoning_effort", "reasoning_strength")
        ),
        "supports_object_arguments": takes_objects,
    }


def _called(arguments: object, *names: str) -> list[dict[str, Any]]:
    """A chat in which these functions were called, and answered."""
    calls = [
        {"id": f"call{i:05}", "type": "function", "function": {"name": n, "arguments": arguments}}
        for i, n in enumerate(names)
    ]
    return [
        _ASKED,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "Result", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "Done"},
        _ASKED,
    ]


def _answered(reasoning: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "Yes", "reasoning_content": reasoning}
