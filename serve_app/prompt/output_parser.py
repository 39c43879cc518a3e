"""Splits what a model says into reasoning, content and tool calls.

Reasoning is what is between two tags at the beginning of an answer; some templates write the first tag into
the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from serve_app.prompt.tool_calls import FORMATS, CallParser, CallPiece, Reasoning, ToolCall
from serve_app.prompt.tool_calls.calls import FunctionNames
from serve_app.prompt.tool_calls.reader import overlap

__all__ = ["DELIMITERS", "OutputParser", "Part", "Reasoning"]


class ReasoningTags(NamedTuple):
    """The texts around the reasoning of a model."""

    open: str
    close: str


THINK = ReasoningTags("<think>", "</think>")
"""The tags of most models: Qwen3, DeepSeek-R1."""
_OTHER_TAGS = (
    ReasoningTags("[THINK]", "[/THINK]"),  # Mistral AI's
    ReasoningTags("<seed:think>", "</seed:think>"),  # ByteDance's
    ReasoningTags("<mm:think>", "</mm:think>"),  # MiniMax M3's
    ReasoningTags("<thinking>", "</thinking>"),
)


def reasoning_tags(template: str) -> ReasoningTags | None:
    """The tags that a chat template shows; None without reasoning, or if it is on a channel."""
    return next((tags for tags in (THINK, *_OTHER_TAGS) if tags.open in template), None)


DELIMITERS = (
    *(tag for tags in (THINK, *_OTHER_TAGS) for tag in tags),
    *sorted({text for one in FORMATS for text in one.delimiters}),
)
"""The texts that structure answers: reasoning, and calls of all formats. Control tokens in some
vocabularies."""


Part = str | Reasoning | ToolCall | CallPiece
"""A piece of content, or of reasoning, or a call, or a piece of one."""


class _State(Enum):
    BEGINNING = 0
    """The text may be reasoning or not."""
    REASONING = 1
    CONTENT = 2


class OutputParser:
    """Splits an answer that arrives in pieces. The result does not depend on how the text is cut. Nothing
    is lost but blanks behind reasoning tags, line ends before the second, and what `CallParser` says.
    Not thread-safe."""

    def __init__(
        self,
        calls: CallParser | None,
        names: FunctionNames | None = None,
        *,
        thinks: bool,
        is_thinking: bool,
        tags: ReasoningTags = THINK,
    ) -> None:
        """`calls` finds the calls; without it, there are none. Calls have the client's names for functions
        if `names` tells them, or else the model's. `is_thinking` says whether the prompt has the first
        tag."""
        self._tags = tags
        self._calls = calls
        self._names = names or FunctionNames(())
        self._state = _State.CONTENT
        if thinks:
            self._state = _State.REASONING if is_thinking else _State.BEGINNING
        self._held = ""
        self._drop_blanks = self._state is _State.REASONING
        """Whether blanks are dropped, as they are the first thing behind a tag."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now, in order; none is empty."""
        self._held += text
        if self._state is _State.BEGINNING:
            self._begin()
        if self._drop_blanks:
            self._held = self._held.lstrip()
            self._drop_blanks = not self._held
        parts: list[Part] = []
        if self._state is _State.REASONING:
            parts += self._reasoning()
        if self._state is _State.CONTENT:
            parts += self._content()
        return parts

    def finish(self) -> list[Part]:
        """The rest, when there is no more text."""
        rest, self._held = self._held, ""
        if self._state is _State.REASONING:
            return [Reasoning(rest)] if rest else []
        if self._calls is None:
            return [rest] if rest else []
        return self._with_client_names([*self._calls.feed(rest), *self._calls.finish()])

    def _begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._tags.open):
            self._state, self._held = _State.REASONING, begun.removeprefix(self._tags.open)
            self._drop_blanks = True
        elif not self._tags.open.startswith(begun):
            self._state = _State.CONTENT

    def _reasoning(self) -> list[Part]:
        close = self._tags.close
        end = self._held.find(close)
        if end >= 0:
            text, self._held = self._held[:end].rstrip("\n"), self._held[end + len(close) :]
            self._held = self._held.lstrip()
            self._state, self._drop_blanks = _State.CONTENT, not self._held
        else:
            text = self._held[: len(self._held) - overlap(self._held, close)].rstrip("\n")
            self._held = self._held[len(text) :]
        return [Reasoning(text)] if text else []

    def _content(self) -> list[Part]:
        text, self._held = self._held, ""
        if self._calls is not None:
            return self._with_client_names(self._calls.feed(text))
        return [text] if text else []

    def _with_client_names(self, parts: Iterable[Part]) -> list[Part]:
        return [
            replace(part, name=self._names.of_client(part.name))
            if isinstance(part, ToolCall | CallPiece) and part.name is not None
            else part
            for part in parts
        ]
