"""Looks at what changes, which are shared by all who ask for them."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class SharedLooks(Generic[Answer]):
    """Looks that are shared by all who ask the same question. Used in one event loop.

    Callers that ask while a look is under way share the next one: no caller gets a state from
    before its question. A question is looked into once in `every_s` seconds at most.
    """

    def __init__(self, look: Callable[[str], Awaitable[Answer]], every_s: float) -> None:
        self._look, self._every_s = look, every_s
        self._next: dict[str, asyncio.Future[Answer]] = {}
        """The answers to questions whose next look has not begun."""
        self._looking: dict[str, asyncio.Task[None]] = {}

    async def ask(self, question: str = "") -> Answer:
        """The result of a look that begins after this call. Raises what the look raises."""
        answer = self._next.setdefault(question, asyncio.get_running_loop().create_future())
        if question not in self._looking:
            # In a context of its own: Serve cancels what a request has called when its client leaves.
            self._looking[question] = asyncio.create_task(
                self._look_on(question), context=contextvars.Context()
            )
        return await asyncio.shield(answer)

    async def _look_on(self, question: str) -> None:
        try:
            while answer := self._next.pop(question, None):
                began = time.monotonic()
                try:
                    answer.set_result(await self._look(question))
                except Exception as error:
                    answer.set_exception(error)
                    answer.exception()  # where nobody waits for it any more, nobody is warned
                await asyncio.sleep(began + self._every_s - time.monotonic())
        finally:
            del self._looking[question]
