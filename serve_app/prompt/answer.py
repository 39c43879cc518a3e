"""What a model says, as thoughts, prose and tool calls.

Thoughts are what is between `<think>` and `</think>` at the beginning of an answer, as Qwen3 and
DeepSeek-R1 write them; some templates write the first tag into the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from serve_app.prompt.tool_calls import CallParser, ToolCall

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Thought:
    """Some of what the model thinks before it answers."""

    text: str


Part = str | Thought | ToolCall
"""A piece of prose, or of a thought, or a call."""


class _State(Enum):
    BEGINNING = 0
    """It may be a thought or not."""
    THINKING = 1
    ANSWERING = 2


class AnswerParser:
    """Splits an answer that arrives in pieces. What is found does not depend on how the text is cut;
    nothing is lost but line ends around the tags of thoughts, and what `CallParser` says. Not
    thread-safe."""

    def __init__(self, calls: CallParser | None, *, thinks: bool, is_thinking: bool) -> None:
        """Without a parser for calls, there are none; `is_thinking` if the prompt has the first tag."""
        self._calls = calls
        self._state = _State.ANSWERING
        if thinks:
            self._state = _State.THINKING if is_thinking else _State.BEGINNING
        self._held = ""
        self._drop_lines = self._state is _State.THINKING
        """Whether line ends are dropped, as they are the first thing behind a tag."""

    def feed(self, text: str) -> list[Part]:
        """What is certain now, in order; no part is empty."""
        self._held += text
        if self._state is _State.BEGINNING:
            self._begin()
        if self._drop_lines:
            self._held = self._held.lstrip("\n")
            self._drop_lines = not self._held
        parts: list[Part] = []
        if self._state is _State.THINKING:
            parts += self._think()
        if self._state is _State.ANSWERING:
            parts += self._answer()
        return parts

    def finish(self) -> list[Part]:
        """The rest, when there is no more text."""
        rest, self._held = self._held, ""
        if self._state is _State.THINKING:
            return [Thought(rest)] if rest else []
        if self._calls is None:
            return [rest] if rest else []
        return [*self._calls.feed(rest), *self._calls.finish()]

    def _begin(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._state, self._held = _State.THINKING, begun.removeprefix(OPEN)
            self._drop_lines = True
        elif not OPEN.startswith(begun):
            self._state = _State.ANSWERING

    def _think(self) -> list[Part]:
        end = self._held.find(CLOSE)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip("\n"), self._held[end + len(CLOSE) :]
            self._held = self._held.lstrip("\n")
            self._state, self._drop_lines = _State.ANSWERING, not self._held
        else:
            begun = next(n for n in range(len(CLOSE) - 1, -1, -1) if self._held.endswith(CLOSE[:n]))
            thought = self._held[: len(self._held) - begun].rstrip("\n")
            self._held = self._held[len(thought) :]
        return [Thought(thought)] if thought else []

    def _answer(self) -> list[Part]:
        text, self._held = self._held, ""
        if self._calls is not None:
            return [*self._calls.feed(text)]
        return [text] if text else []
