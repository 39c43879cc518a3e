"""The base of the formats' parsers: finds calls in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from serve_app.prompt.tool_calls.calls import ToolCall
from serve_app.prompt.tool_calls.reader import NoCallError, Reading, TextReader, overlap


class After(Enum):
    """What came last."""

    NOTHING = 0
    CALL = 1
    CONTENT = 2


class CallParser:
    """Splits a text that arrives in pieces into content and calls. What is found does not depend on how the
    text is cut, and nothing is lost but line ends around calls, and what a format has between them: what
    looks like a call and is none comes back as the content that it is. Not thread-safe."""

    opening: str
    """What every call begins with."""

    def __init__(self) -> None:
        self._text = TextReader()
        """What is not certain yet: the start of an opening, or a call that is not complete."""
        self._after = After.NOTHING
        self._reading: Reading[Sequence[ToolCall]] | None = None
        """Reads what is behind an opening."""
        self._n_opening = 0
        """How long that opening is, with what is dropped before it."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is certain now, in order; no piece of content is empty."""
        self._text.append(text)
        parts: list[str | ToolCall] = []
        while True:
            if self._reading is None:
                parts += self._content_before_opening()
            if self._reading is None:
                return parts
            try:
                next(self._reading)
                return parts
            except StopIteration as end:
                calls: Sequence[ToolCall] = end.value
            except NoCallError:
                calls = ()
            self._reading = None
            parts += self._called(calls) if calls else self._refused()

    def finish(self) -> list[str | ToolCall]:
        """The rest, when there is no more text."""
        self._reading = None
        self._text.rewind()
        return self._content(len(self._text.text))

    def _content_before_opening(self) -> list[str | ToolCall]:
        """What is certain to be content; begins to read if an opening follows."""
        text = self._text
        if self._after is After.CALL:
            while text.text.startswith("\n", text.at):
                text.advance(text.at + 1)
            text.forget()
        start, end = self._find(text.text, text.at)
        content = self._content(start) if start > text.at else []
        if end is not None:
            text.advance(end)
            self._n_opening = end - start
            self._reading = self._read(text)
        return content

    def _called(self, calls: Sequence[ToolCall]) -> list[str | ToolCall]:
        self._text.forget()
        self._after = After.CALL
        return [*calls]

    def _refused(self) -> list[str | ToolCall]:
        """The opening is content; calls may begin behind it."""
        self._text.rewind()
        return self._content(self._text.at + self._n_opening)

    def _content(self, end: int) -> list[str | ToolCall]:
        """What is before this place."""
        self._text.advance(end)
        self._after = After.CONTENT
        content = self._text.forget()
        return [content] if content else []

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        """Where, from this place on, the first opening begins, with the line ends before it, and where it
        ends: None while there is only what may become one. The text's end if there is not even that."""
        found = text.find(self.opening, at)
        start = found if found >= 0 else len(text) - overlap(text, self.opening, at)
        while start > at and text[start - 1] == "\n":
            start -= 1
        return start, None if found < 0 else found + len(self.opening)

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        """Reads what is behind an opening, and returns its calls. Raises NoCallError, or returns none, if
        there is no call."""
        raise NotImplementedError
