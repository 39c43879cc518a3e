"""The tools and choices of OpenAI's requests that are no plain functions.

Source: OpenAI's API reference, "Chat" and "Responses", `tools` and `tool_choice`.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, Literal

from pydantic import Field, model_validator

from serve_app.base.errors import InvalidRequestError
from serve_app.prompt.conversation import json_object
from serve_app.server.answering.tools import FunctionDefinition, FunctionName
from serve_app.server.http.request_model import RequestModel, name_ignored


class TextGrammar(RequestModel):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(RequestModel):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"] = "text"
    grammar: TextGrammar | None = None

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, value: Any) -> Any:
        """Responses have the grammar's fields beside the type."""
        if not isinstance(value, dict) or "definition" not in value:
            return value
        names = ("syntax", "definition")
        rest = {name: inner for name, inner in value.items() if name not in names}
        return {**rest, "grammar": {name: value.get(name) for name in names}}


_FLAGS = re.compile(r"\A\(\?([ims]+)\)(.*)\Z", re.DOTALL)
"""Flags before a regular expression, which those of custom tools may have, and patterns of schemas not."""


class CustomDefinition(RequestModel):
    """A tool that takes a text."""

    name: FunctionName
    description: str | None = None
    format: CustomFormat = Field(default=CustomFormat())

    def as_function(self) -> FunctionDefinition:
        """The tool as a function with one parameter. A regular expression holds the text; a Lark grammar is
        described to the model."""
        grammar, description = self.format.grammar, self.description or ""
        text: dict[str, Any] = {"type": "string"}
        if grammar is not None and grammar.syntax == "regex":
            definition = _FLAGS.sub(r"(?\1:\2)", grammar.definition)
            text["pattern"] = f"^(?:{definition})$"
        elif grammar is not None:
            description += f"\n\nThe input matches this Lark grammar:\n{grammar.definition}"
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return FunctionDefinition(
            name=self.name, description=description.strip(), parameters=parameters
        )


class CustomTool(RequestModel):
    """A tool in `tools` that takes a text."""

    type: Literal["custom"]
    custom: CustomDefinition


CUSTOM_INPUT = "input"
"""The parameter of the function that stands for a custom tool."""


def input_of(arguments: str) -> str:
    """The input of a custom tool in the arguments of a call, or these as they are."""
    text = (json_object(arguments) or {}).get(CUSTOM_INPUT)
    return text if isinstance(text, str) else arguments


def known_tools(kinds: Container[str], tools: object) -> object:
    """The tools of these kinds. Others are run by servers of the protocol's inventor: they are left out,
    and the answer names them."""
    if not isinstance(tools, list):
        return tools
    known: list[object] = []
    unknown: list[dict[str, Any]] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            unknown.append(tool)
        else:
            known.append(tool)
    name_ignored(f"tools.{tool['type']}" for tool in unknown)
    return known


def with_custom_tools(tools: object) -> object:
    """The functions and custom tools of a chat, custom tools as the functions that stand for them."""
    known = known_tools(("function", "custom"), tools)
    return [_as_function(tool) for tool in known] if isinstance(known, list) else known


def _as_function(tool: object) -> object:
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        # As responses have it.
        return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    if not isinstance(tool, dict) or tool.get("type") != "custom":
        return tool
    custom = CustomDefinition.model_validate(tool.get("custom"))
    return {"type": "custom", "function": custom.as_function()}


def plain_choice(choice: object) -> Any:
    """A `tool_choice` in the form of NamedToolChoice or AllowedToolChoice, or a text, from any form that
    clients send. Raises InvalidRequestError for a tool that is not the client's: nobody here could call
    it."""
    if isinstance(choice, str):
        word = choice.lower()
        return {"": None, "any": "required"}.get(word, word)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(kind, str):
        return choice
    if kind in ("auto", "none", "required", "any"):
        return plain_choice(kind)
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
        return {"type": kind, "mode": mode, "names": _names_allowed(tools)}
    if (name := _name_in_choice(choice)) is not None:
        return {"type": "function", "function": {"name": name}}
    if kind == "function":
        return choice
    raise InvalidRequestError(
        f"'tool_choice' asks for a tool of the type {kind!r}, which this server does not run.",
        "tool_choice",
    )


def _names_allowed(tools: object) -> object:
    """The names of the tools that a choice allows; the answer names those that are not the client's."""
    if not isinstance(tools, list):
        return None
    names = [(tool, _name_in_choice(tool)) for tool in tools]
    foreign = [tool["type"] for tool, name in names if name is None and _is_of_servers(tool)]
    name_ignored(f"tool_choice.tools.{kind}" for kind in foreign)
    return [name for tool, name in names if name is not None or not _is_of_servers(tool)]


def _is_of_servers(tool: object) -> bool:
    """Whether a tool in a choice is run by servers of the protocol's inventor."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in _NAMED_KINDS


def _name_in_choice(choice: object) -> object:
    """The function's or custom tool's name in a choice; a tool of a client that has none is its type. None
    if there is none, or the tool is not the client's."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(kind, str) or _is_of_servers(choice):
        return None
    named = choice.get(kind)
    name = (named if isinstance(named, dict) else choice).get("name")
    return kind if name is None and kind in CLIENT_TOOLS else name


CLIENT_TOOLS = ("local_shell", "shell", "apply_patch", "tool_search")
"""The tools of responses that a client runs, and that have a type for a name."""
_NAMED_KINDS = ("function", "custom", "tool", "namespace", *CLIENT_TOOLS)
"""The types in a choice of tools that a client runs; `tool` is Anthropic's."""
