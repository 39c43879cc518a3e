"""The tools of Anthropic's requests, and their translation to functions.

A client's own tools have a schema, or a type for which Anthropic's models know one: that schema is written
here. Tools of other types are run by Anthropic's servers. Agents declare them with every request, needed or
not. They are left out, and the answer names them.

Source: Anthropic's API reference, "Tools".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from serve_app.ingress.generation.tools import FunctionDefinition, FunctionName, Tool
from serve_app.ingress.http.request_model import RequestModel, name_ignored

Json = dict[str, Any]
_TEXT = {"type": "string"}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_LINE = {"type": "integer", "minimum": 0}


def _schema(commands: tuple[str, ...] = (), **properties: Json) -> Json:
    command = {"enum": list(commands)} if commands else _TEXT
    required = ["command"] if commands else []
    return {
        "type": "object",
        "properties": {"command": command, **properties},
        "required": required,
    }


_EDITOR = ("view", "create", "str_replace", "insert")
_FILE: Mapping[str, Json] = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
    "view_range": _RANGE,
    "insert_line": _LINE,
}
_KNOWN: Mapping[str, tuple[str, Json]] = {
    "bash": (
        "Runs a command in a shell that stays open. `restart` begins a new shell.",
        _schema(restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views, creates and changes files: `str_replace` replaces `old_str`, which must be there once, by"
        " `new_str`; `insert` adds `insert_text` after a line.",
        _schema(_EDITOR, **_FILE),
    ),
    "memory": (
        "Views, creates, changes, deletes and renames files in the folder /memories.",
        _schema((*_EDITOR, "delete", "rename"), **_FILE, old_path=_TEXT, new_path=_TEXT),
    ),
}
"""The client's tools whose types, without their dates, are known to Anthropic's models."""
_DATED = re.compile(r"(.+)_[0-9]{8}")


class AnthropicTool(RequestModel):
    """One of `tools`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "defer_loading": (None, False),
        "allowed_callers": (None, ["direct"]),
        "input_examples": (None, []),
    }
    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control", "eager_input_streaming"})

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(default={})
    strict: bool | None = None
    """Whether the input is held to the schema."""

    def as_tool(self) -> Tool:
        """The tool as OpenAI has it."""
        function = FunctionDefinition(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


def _clients(tools: object) -> object:
    """The client's own tools, each with a schema."""
    if not isinstance(tools, list):
        return [] if tools is None else tools
    own = [_own(tool) for tool in tools]
    left_out = [tool for tool, mine in zip(tools, own, strict=True) if mine is None]
    name_ignored(f"tools.{tool['type']}" for tool in left_out)
    return [tool for tool in own if tool is not None]


def _own(tool: object) -> object | None:
    """The tool with a schema; None if it is not the client's."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(kind, str) or kind == "custom":
        return tool
    if "input_schema" in tool:
        return {**tool, "type": "custom"}
    dated = _DATED.fullmatch(kind)
    known = _KNOWN.get(dated[1]) if dated else None
    if known is None:
        return None
    description, schema = known
    kept = {key: tool[key] for key in ("name", "cache_control") if key in tool}
    return {**kept, "description": description, "input_schema": schema}


def with_possible_choice(request: Any) -> Any:
    """The request without a `tool_choice` that asks for a tool which is left out; the answer names it."""
    tools = request.get("tools") if isinstance(request, dict) else None
    choice = request.get("tool_choice") if isinstance(request, dict) else None
    if not (isinstance(tools, list) and tools and isinstance(choice, dict)):
        return request
    left_out = [tool for tool in tools if _own(tool) is None]
    names = [tool.get("name") for tool in left_out if isinstance(tool, dict)]
    is_any = choice.get("type") == "any" and len(left_out) == len(tools)
    if not is_any and not (choice.get("type") == "tool" and choice.get("name") in names):
        return request
    name_ignored(["tool_choice"])
    return {name: value for name, value in request.items() if name != "tool_choice"}


AnthropicTools = Annotated[list[AnthropicTool], BeforeValidator(_clients)]
