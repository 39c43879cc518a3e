"""Text of one sequence: bytes become whole characters, and stop strings, time and indentation end it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from serve_app.sampling import SamplingParams


class Detokenizer:
    """Turns one sequence's token bytes into text that may be shown.

    Bytes of an unfinished character wait for the rest; text that may be the beginning of a stop
    string waits until that is decided. Once `stop` is set, the text is complete.
    """

    def __init__(self, stop_strings: Sequence[str] = ()) -> None:
        self._stop_strings = tuple(stop_strings)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stop: str | None = None
        """The stop string that was found."""

    def push(self, piece: bytes) -> str:
        """Add one token's bytes; returns the text that is now certain."""
        self._held += self._utf8.decode(piece)
        position, found = self._first_stop()
        if found is not None:
            self.stop = found
            shown, self._held = self._held[:position], ""
            return shown
        keep = self._undecided()
        cut = len(self._held) - keep
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

    def _first_stop(self) -> tuple[int, str | None]:
        """The earliest stop string in the held text; of two at one place, the first listed."""
        found = [
            (position, i)
            for i, stop in enumerate(self._stop_strings)
            if (position := self._held.find(stop)) >= 0
        ]
        if not found:
            return -1, None
        position, i = min(found)
        return position, self._stop_strings[i]

    def _undecided(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        return max((_overlap(self._held, stop) for stop in self._stop_strings), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


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
        shown = self._indented(text) if self._n_indent else None
        if shown is None and 0 < self._max_s < elapsed_s and "\n" in text:
            return text
        return shown

    def _indented(self, text: str) -> str | None:
        for i, character in enumerate(text):
            if self._blanks is not None:
                if character in _BLANKS:
                    self._blanks += 1
                    continue
                if self._blanks < self._n_indent:
                    return text[:i]
            self._blanks = 0 if character == "\n" else None
        return None
