"""The base of parsers for formats whose answers have parts between tags: reasoning, calls, and content."""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, Reasoning, ToolCall
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader, overlap

_NO_CHARS = re.compile(r"")


class ChannelParser(CallParser):
    """Tags are no content, but those of calls that are none."""

    thought: tuple[str, str]
    """The texts before and after reasoning."""
    dropped: tuple[str, ...]
    """Other tags that stand for nothing by themselves."""
    thought_header: re.Pattern[str] = _NO_CHARS
    """The characters that may follow the first tag of reasoning, a class with a star."""

    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self._has_functions = bool(functions)
        self._opened = ""
        self._tags = (self.opening, *self.thought, *self.dropped)
        self._pattern = re.compile("|".join(map(re.escape, self._tags)))

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        match = self._pattern.search(text, at)
        self._opened = match[0] if match else ""
        start = (
            match.start() if match else len(text) - max(overlap(text, d, at) for d in self._tags)
        )
        while self._opened in ("", self.opening) and start > at and text[start - 1] == "\n":
            start -= 1
        return start, match.end() if match else None

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        if self._opened == self.opening:
            return (yield from self._calls(text)) if self._has_functions else ()
        if self._opened == self.thought[0]:
            yield from text.run(self.thought_header)
            yield from text.run(BLANKS)
            if self.splits_reasoning:
                yield from self._reasoning(text)
        return None

    def _calls(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        """Reads the calls after their opening."""
        raise NotImplementedError

    def _reasoning(self, text: TextReader) -> Reading[None]:
        while (piece := (yield from text.some_until(self.thought[1]))) is not None:
            self._tell(Reasoning(piece))


def thought_rules(thought: tuple[str, str], delimiter: lark.Delimiter) -> str:
    """The rules `thought`, which is reasoning with its tags, and TEXT, which is any text."""
    opening, closing = map(delimiter, thought)
    lazy = "[lazy]" if closing.startswith('"') else ""
    return f"""thought: {opening} thought_end
thought_end{lazy}: TEXT {closing}
TEXT: /(.|\\n)*/"""
