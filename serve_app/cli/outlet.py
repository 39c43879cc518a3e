"""Output that never waits and never fails: what cannot be written is dropped, and counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from threading import Thread

MOST_TEXTS = 10_000
"""Texts that wait for a file which takes none now, such as a pipe that nobody reads."""


class Outlet:
    """Texts on their way to a file that may be full, closed, or stalled. Has the methods of a file that
    others write to. Any thread."""

    def __init__(self, write: Callable[[str], object]) -> None:
        """`write` is called in a thread of its own. It may block, and raise."""
        self._write = write
        self._texts = Queue[str | None](MOST_TEXTS)
        self.n_dropped = 0
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Have the text written, if there is room for it. Returns the number of its characters."""
        try:
            self._texts.put_nowait(text)
        except Full:
            self.n_dropped += 1
        return len(text)

    def flush(self) -> None:
        """Returns at once: nothing is to be waited for."""

    def isatty(self) -> bool:
        return False

    def close(self, timeout_s: float) -> None:
        """Wait until all is written, or for so many seconds."""
        with suppress(Full):
            self._texts.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (text := self._texts.get()) is not None:
            try:
                self._write(text)
            except Exception:  # also of a file that is closed
                self.n_dropped += 1
