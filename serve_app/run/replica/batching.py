"""Entries that arrive together enter the engine together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Entry = TypeVar("Entry")
Outcome = TypeVar("Outcome")


class Batcher(Generic[Entry, Outcome]):
    """Collects the entries of one turn of the event loop for one call. Used in one event loop."""

    def __init__(self, work: Callable[[list[Entry]], Sequence[Outcome]], most: int) -> None:
        """`work` gets up to `most` entries, and returns an outcome for each."""
        self._work, self._most = work, most
        self._waiting: deque[tuple[Entry, asyncio.Future[Outcome]]] = deque()

    def enter(self, entry: Entry) -> asyncio.Future[Outcome]:
        """The entry's outcome. An entry whose future is cancelled before its turn is dropped."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Outcome] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._run)
        self._waiting.append((entry, outcome))
        return outcome

    def _run(self) -> None:
        entries = list[tuple[Entry, asyncio.Future[Outcome]]]()
        while self._waiting and len(entries) < self._most:
            if not self._waiting[0][1].done():
                entries.append(self._waiting[0])
            self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        try:
            for (_, future), outcome in zip(
                entries, self._work([entry for entry, _ in entries]), strict=True
            ):
                future.set_result(outcome)
        except Exception as error:
            for _, future in entries:
                if not future.done():
                    future.set_exception(error)
