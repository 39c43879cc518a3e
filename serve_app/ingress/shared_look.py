"""Shares one look among many who ask the same at the same time."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class SharedLooks(Generic[Found]):
    """Looks that are shared by all who ask the same question. Used in one event loop.

    Callers that ask while a look is under way share the next one: no caller gets a state from
    before its question. A question is looked into once in `every_s` seconds at most.
    """

    def __init__(self, look: Callable[[str], Awaitable[Found]], every_s: float) -> None:
        self._look = look
        self._every_s = every_s
        self._waiting: dict[str, list[asyncio.Future[Found]]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}

    async def ask(self, question: str = "") -> Found:
        """The result of a look that begins after this call. Raises what the look raises."""
        found: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(question, []).append(found)
        if question not in self._looking:
            # In a context of its own: Serve cancels what a request has called when its client leaves.
            self._looking[question] = asyncio.create_task(
                self._look_on(question), context=contextvars.Context()
            )
        return await found

    async def _look_on(self, question: str) -> None:
        """Until nobody waits."""
        try:
            while waiting := self._waiting.pop(question, None):
                began = time.monotonic()
                await self._answer(question, waiting)
                await asyncio.sleep(began + self._every_s - time.monotonic())
        finally:
            del self._looking[question]

    async def _answer(self, question: str, waiting: list[asyncio.Future[Found]]) -> None:
        try:
            found = await self._look(question)
        except Exception as error:
            for one in waiting:
                if not one.done():  # its asker may have left
                    one.set_exception(error)
        else:
            for one in waiting:
                if not one.done():
                    one.set_result(found)
