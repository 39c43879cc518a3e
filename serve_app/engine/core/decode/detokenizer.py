"""The detokenizer: token bytes become whole characters, and stop strings are found across tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


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
