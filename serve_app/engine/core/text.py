"""Text of one sequence: bytes become whole characters, and stop strings, time and indentation end it."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence

from serve_app.base.sampling import SamplingParams


class Detokenizer:
    """Turns one sequence's token bytes into text that may be shown.

    Bytes of an unfinished character wait for the rest; text that may be the beginning of a stop
    string waits until that is decided. Once `stop` is set, the text is complete. The time of a token
    depends on the text that waits, and not on the number of stop strings.
    """

    def __init__(self, stop_strings: Sequence[str] = ()) -> None:
        self._stop_strings = tuple(stop_strings)
        self._sorted_stops = _without_longer(sorted(stop_strings))
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stop: str | None = None

    def push(self, piece: bytes) -> str:
        """Add one token's bytes; returns the text that is now certain."""
        self._held += self._utf8.decode(piece)
        cut = len(self._held)
        for start in range(cut if self._sorted_stops else 0):
            rest = self._held[start:]
            # No stop begins with another: none stands between the text and a stop that begins it.
            i = bisect_right(self._sorted_stops, rest)
            if i and rest.startswith(self._sorted_stops[i - 1]):
                self.stop = next(stop for stop in self._stop_strings if rest.startswith(stop))
                shown, self._held = self._held[:start], ""
                return shown
            if i < len(self._sorted_stops) and self._sorted_stops[i].startswith(rest):
                cut = min(cut, start)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The rest, when the sequence ended otherwise: held text, and U+FFFD for a cut character."""
        shown = self._held + self._utf8.decode(b"", final=True)
        self._held = ""
        return shown

    def drop(self) -> None:
        """Nothing that is held back is shown any more."""
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
