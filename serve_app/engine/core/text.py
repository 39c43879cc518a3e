"""Text of one sequence: bytes become whole characters, and stop strings, time and indentation end it."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence

from serve_app.base.sampling import SamplingParams


class Detokenizer:
    """Turns one sequence's token bytes into text that may be shown.

    Bytes of an unfinished character wait for the rest; text that may be the beginning of a stop
    string waits until that is decided. Once `stop` is set, the text is complete. The time of a token
    depends on how many different lengths stop strings have, and not on their number.
    """

    def __init__(self, stop_strings: Sequence[str] = ()) -> None:
        self._stop_strings = tuple(stop_strings)
        self._sorted_stops = _without_longer(sorted(stop_strings))
        self._stops = frozenset(self._sorted_stops)
        self._lengths = sorted({len(stop) for stop in self._stops}, reverse=True)
        self._last = frozenset(stop[-1] for stop in self._stops)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        """Empty, or the beginning of a stop string without any stop string in it."""
        self.stop: str | None = None

    def push(self, piece: bytes) -> str:
        """Add one token's bytes; returns the text that is now certain."""
        n_held = len(self._held)
        self._held += self._utf8.decode(piece)
        if not self._stops:
            return self._show(len(self._held))
        if (start := self._find_stop(n_held)) is not None:
            rest = self._held[start:]
            self.stop = next(stop for stop in self._stop_strings if rest.startswith(stop))
            shown, self._held = self._held[:start], ""
            return shown
        return self._show(next(filter(self._may_begin, range(len(self._held))), len(self._held)))

    def _show(self, cut: int) -> str:
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _find_stop(self, n_held: int) -> int | None:
        """The first position of a stop string, which ends behind the first `n_held` characters."""
        first = len(self._held)
        for end in range(n_held + 1, len(self._held) + 1):
            if self._held[end - 1] in self._last:
                for length in self._lengths:
                    if length <= end and self._held[end - length : end] in self._stops:
                        first = min(first, end - length)
                        break  # shorter ones begin later
        return first if first < len(self._held) else None

    def _may_begin(self, start: int) -> bool:
        """Whether a stop string begins with all the text from there on."""
        rest = self._held[start:]
        i = bisect_left(self._sorted_stops, rest)
        return i < len(self._sorted_stops) and self._sorted_stops[i].startswith(rest)

    def flush(self) -> str:
        """The rest, when the sequence ended otherwise: held text, and U+FFFD for a cut character."""
        shown = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return shown

    def drop(self) -> None:
        """Forget the text that is held back."""
        self._held = ""
        self._utf8.reset()


def _without_longer(stops: Sequence[str]) -> list[str]:
    """The sorted stops without any that begins with another one, which ends the text before."""
    shortest = list[str]()
    for stop in stops:
        if not (shortest and stop.startswith(shortest[-1])):
            shortest.append(stop)
    return shortest


_BLANKS = " \t"


class LineLimits:
    """`n_indent` and `t_max_predict_ms` for one text. Decoder thread only.

    Source: llama.cpp, `process_token` in tools/server/server-context.cpp: an empty line has no indentation,
    and the first line is not looked at.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._n_indent = sampling.n_indent
        self._max_s = sampling.t_max_predict_ms / 1000
        self._blanks: int | None = None
        """Blanks that the line begins with; None in its middle, and in the first line."""

    def cut(self, text: str, elapsed_s: float) -> str | None:
        """The rest of the newest text, so many seconds after the first token, if the sequence ends
        with it; None if it goes on."""
        if not text:
            return None
        shown = self._cut_at_indent(text) if self._n_indent else None
        if shown is None and 0 < self._max_s < elapsed_s and "\n" in text:
            return text
        return shown

    def _cut_at_indent(self, text: str) -> str | None:
        for i, character in enumerate(text):
            if self._blanks is not None:
                if character in _BLANKS:
                    self._blanks += 1
                    continue
                if self._blanks < self._n_indent:
                    return text[:i]
            self._blanks = 0 if character == "\n" else None
        return None
