"""The type of a format of tool calls: how a model writes calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from serve_app.prompt.conversation import Turn
from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function
from serve_app.prompt.tool_calls.parser import CallParser

Describe = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]]], list[Turn]]
"""Puts functions, calls and results into the texts of turns."""


class ThinkingPhase(Enum):
    """Whether reasoning comes before what a grammar holds."""

    NEVER = 0
    PERHAPS = 1
    BEGUN = 2
    """The prompt begins it."""
    BEHIND = 3
    """The prompt has the beginning of the answer itself."""
    OFF = 4
    """The request switches it off: none may begin, on no channel either."""


@dataclass(frozen=True)
class ToolFormat:
    """A way in which models write calls."""

    name: str
    template_patterns: tuple[str, ...]
    """Regular expressions that are all found in its templates. Formats with more are tried first."""
    delimiters: tuple[str, ...]
    """Texts of the format that are tokens of their own in some vocabularies."""
    make_parser: Callable[[Sequence[Function]], CallParser]
    rules: Callable[[Sequence[Function], lark.Delimiter, bool], str]
    """The rule `calls` in llguidance's Lark, and those that it needs. It is for what is behind the
    first opening: one call, or more if the flag is set."""
    opening: str | None = None
    """The delimiter before a call; None if a call is just the whole answer."""
    message: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Converts a message to the form that its templates take."""
    free_start: Callable[[lark.Delimiter], str] | None = None
    """The rule `start` of answers that need not be calls, where that is not text and then calls."""
    forced_start: Callable[[lark.Delimiter, bool, ThinkingPhase], str] | None = None
    """The rule `start` of answers that match `answer` or, with the flag, `calls` (channels)."""
    unwritable: str | None = None
    """A regular expression of what no parameter can have, where names have no quotation marks."""
    holds_answers: bool = False
    """Whether a grammar holds all answers to chats with tools."""
    has_channels: bool = False
    """Whether its parser splits reasoning off, too, and is needed without tools."""
    thinks: bool = True
    """Whether answers on its channels may have reasoning."""
    thought: tuple[str, str] | None = None
    """The texts around reasoning, where a prompt may end with the first."""
    is_shown: bool = False
    """Whether a template's own way of writing calls takes the place of the format, if it shows."""
    split: Callable[[Turn], Turn] | None = None
    """Splits an assistant's turn whose content has the format's own tags, where templates refuse these."""
    describe: Describe | None = None
    """The description of tools for templates that have neither tools nor calls."""

    def without_unwritable(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """A function's schema without the properties that the format cannot write, and their names."""
        properties = lark.properties_of(schema)
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
        is_thinking: bool = False,
    ) -> CallParser:
        """The parser of an answer to a chat with these tools, as OpenAI describes them. `is_thinking` says
        whether the prompt has begun the reasoning."""
        parser = self.make_parser([tool["function"] for tool in tools])
        parser.in_pieces, parser.splits_reasoning = in_pieces, splits_reasoning
        parser.is_thinking = is_thinking and self.thought is not None
        return parser
