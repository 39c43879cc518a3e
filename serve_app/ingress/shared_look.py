"""Shares one look among many who ask the same at the same time."""

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
        self._look = look
        self._every_s = every_s
        self._waiting: dict[str, list[asyncio.Future[Answer]]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}

    async def ask(self, question: str = "") -> Answer:
        """The result of a look that begins after this call. Raises what the look raises."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(question, []).append(answer)
        if question not in self._looking:
            # In a context of its own: Serve cancels what a request has called when its client leaves.
            self._looking[question] = asyncio.create_task(
                self._look_on(question), context=contextvars.Context()
            )
        return await answer

    async def _look_on(self, question: str) -> None:
        """Until nobody waits."""
        try:
            while waiting := self._waiting.pop(question, None):
                began = time.monotonic()
                await self._answer(question, waiting)
                await asyncio.sleep(began + self._every_s - time.monotonic())
        finally:
            del self._looking[question]

    async def _answer(self, question: str, waiting: list[asyncio.Future[Answer]]) -> None:
        try:
            answer = await self._look(question)
        except Exception as error:
            for future in waiting:
                if not future.done():  # its asker may have left
                    future.set_exception(error)
        else:
            for future in waiting:
                if not future.done():
                    future.set_result(answer)
