"""The type that each module of `formats` declares: how a model writes calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.prompt.conversation import Turn
from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.schemas import properties_of

Describe = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]]], list[Turn]]
"""Puts functions, calls and results into the texts of turns."""
EXAMPLE_FUNCTIONS: tuple[dict[str, Any], ...] = (
    {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    {"name": "now"},
)
"""The functions in every format's example."""
EXAMPLE_CALLS = (ToolCall("get_weather", '{"city": "Tromsø", "days": 2}'), ToolCall("now", "{}"))
"""The calls in every format's example."""


@dataclass(frozen=True)
class Example:
    """EXAMPLE_CALLS, as the format's models write them: what all formats are tested with."""

    first: str
    second: str
    both: str | None
    """An answer of both calls; None if there is one call in an answer at most."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    template_patterns: tuple[str, ...]
    """Regular expressions that are all found in templates which ask for it. Formats with more of them are
    tried first."""
    delimiters: tuple[str, ...]
    """Texts of the format that are tokens of their own in some vocabularies."""
    make_parser: Callable[[Sequence[Function]], CallParser]
    rules: Callable[[Sequence[Function], lark.Delimiter, bool], str]
    """The rule `calls` in llguidance's Lark, and those that it needs: what is behind the first opening,
    which is one call, or more if the flag is set."""
    example: Example
    opening: str | None = None
    """The delimiter before a call; None if a call is just the whole answer."""
    message: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Converts a message to the form that its templates take."""
    tool: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Converts a tool to the form that they take."""
    said: Callable[[lark.Delimiter], str] | None = None
    """The rule `start` of answers that need not be calls, and what it needs, where that is not any text and
    then calls."""
    held: Callable[[lark.Delimiter, bool], str] | None = None
    """The rule `start` of answers that match the rule `answer` or, if the flag is set, `calls`. Formats
    with channels need it."""
    unwritable: str | None = None
    """A regular expression of the characters that no name of a parameter can have, where names stand
    without quotation marks."""
    holds_answers: bool = False
    """Whether a grammar holds all answers to chats with tools."""
    has_channels: bool = False
    """Whether its parser splits reasoning off, too, and is needed without tools."""
    describe: Describe | None = None
    """The description of tools for templates that have neither tools nor calls."""

    def without_unwritable(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """A function's schema without the properties that the format cannot write, and their names."""
        properties = properties_of(schema)
        if self.unwritable is None:
            return schema, []
        names = [name for name in properties if not name or re.search(self.unwritable, name)]
        left = {name: inner for name, inner in properties.items() if name not in names}
        return ({**schema, "properties": left} if names else schema), names

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        in_pieces: bool = False,
        splits_reasoning: bool = True,
    ) -> CallParser:
        """The parser of an answer to a chat with these tools, as OpenAI describes them."""
        parser = self.make_parser([tool["function"] for tool in tools])
        parser.in_pieces, parser.splits_reasoning = in_pieces, splits_reasoning
        return parser
