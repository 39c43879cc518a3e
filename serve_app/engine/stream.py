"""Streams of deltas out of the decoder thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from serve_app.base.values.answers import SequenceEnd, TokenDelta

Abort = Callable[[], None]


class TokenStream:
    """The deltas of a request as an async iterator; made and read in one event loop.

    A reader that falls behind gets what piled up as one delta: nothing is lost, nobody waits for it. The
    iteration stops after the delta that carries `end`. If the request ended in an error, that error is
    raised instead, after the text that came before it. A reader that leaves early must call `abort` (or
    use the stream as an async context manager), or the sequence runs on to its end.
    """

    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._pending: deque[TokenDelta] = deque()
        self._wake_scheduled = False
        self._end: SequenceEnd | None = None

    def push(self, delta: TokenDelta) -> None:
        """Decoder thread: hand over a delta. Aborts the request if the reader's loop is gone."""
        self._pending.append(delta)
        if self._wake_scheduled:
            return
        self._wake_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed
            self._abort()

    def _wake(self) -> None:
        self._wake_scheduled = False
        self._ready.set()

    def abort(self) -> None:
        """End the request now; its last delta says so. Idempotent, any thread."""
        if self._end is None:
            self._abort()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._end is not None:
            raise StopAsyncIteration
        while not self._pending:
            self._ready.clear()
            await self._ready.wait()
        delta = self._pending.popleft()
        while self._pending and not _is_failure(self._pending[0]):
            delta = delta.then(self._pending.popleft())
        self._end = delta.end
        if delta.end is not None and delta.end.error is not None:
            raise delta.end.error
        return delta

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()


def _is_failure(delta: TokenDelta) -> bool:
    return delta.end is not None and delta.end.error is not None
