"""What other threads want done with the lanes, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from serve_app.engine.kv_cache.manager import Lanes
from serve_app.errors import CorralError


class Errand:
    """Something to be done with the lanes, between two steps. `future` tells what came of it."""

    def __init__(self, run: Callable[[Lanes], Any]) -> None:
        self._run = run
        self.future: Future[Any] = Future()

    def run(self, lanes: Lanes) -> None:
        """Decoder thread: do it, once. What it raises, `future` raises."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._run(lanes))
        except Exception as error:
            self.future.set_exception(error)

    def refuse(self, error: CorralError) -> None:
        """Decoder thread: it is not done; once."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
