"""Commands: work on the KV cache that other threads ask for, and that is done between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from serve_app.engine.kv_cache.manager import KVCacheManager
from serve_app.errors import CorralError


class Command:
    """Something to be done with the KV cache, between two steps. `future` has the result."""

    def __init__(self, run: Callable[[KVCacheManager], Any]) -> None:
        self._run = run
        self.future: Future[Any] = Future()

    def run(self, cache: KVCacheManager) -> None:
        """Decoder thread: do it, once. `future` raises its exception."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._run(cache))
        except Exception as error:
            self.future.set_exception(error)

    def refuse(self, error: CorralError) -> None:
        """Decoder thread: it is not done; once."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
