"""The workers of one ingress replica: started, bounded, and replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol, TypeVar, cast

from serve_app.errors import (
    CorralError,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
)
from serve_app.ingress.workers import wire
from serve_app.ingress.workers.places import Places
from serve_app.ingress.workers.processes import Worker, WorkerDiedError, Zygote
from serve_app.ingress.workers.worker import CPU_S, Models, Work
from serve_app.ingress.workers.zygote import ModelFile, Start

logger = logging.getLogger("corral.ingress")

T = TypeVar("T")

QUICK_S = 0.02
"""CPU seconds. Work that takes longer gets less of the processor, and its place is free for the next."""
STUCK_S = 10.0
"""Work that has not ended after so long counts as slow, however little of the processor it took."""
WALL_S = 120.0
"""Longest time that a request's work may take, however little of the processor it gets."""
DEADLY_S = 600.0
"""Seconds for which a body that ended two workers is refused at once."""
MAX_SLOW_WAITING = 8
"""Requests of one client that may wait for a place for slow work."""

_N_TRIES = 2
_DEADLY_KEPT = 1024
_BUSY_RETRY_S = 10
_LEAST_WAIT_S = 0.005


class Workers(Protocol):
    """Where clients' bodies are read."""

    async def run(self, client: str, work: Callable[[Models, bytes], T], body: bytes) -> T:
        """What `work` makes of this body. `work` must be importable by its name.

        Raises CorralError: what `work` raises; InvalidRequestError if it ended two workers;
        QueueFullError if too much of this client waits. Cancelling it ends the work.
        """


class WorkerPool:
    """Workers that are forked from one process, which has read the models' vocabularies. Event loop only.

    `n_quick` requests are worked on at full speed. What takes longer than QUICK_S gives up that place. It
    goes on with little of the processor, `n_slow` at a time. Places are taken in turns by client.
    """

    def __init__(
        self,
        models: Sequence[ModelFile],
        modules: Sequence[str],
        *,
        n_quick: int = 2,
        n_slow: int = 1,
    ) -> None:
        """The zygote starts now, and imports these modules; workers start when they are needed."""
        self._start = Start(tuple(models), tuple(modules))
        self._zygote = Zygote(self._start)
        self._forking = asyncio.Lock()
        self._quick, self._slow = Places(n_quick), Places(n_slow)
        self._is_closed = False
        self._idle: list[Worker] = []
        self.at_work: set[Worker] = set()
        self._deadly: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        """Lengths and digests of bodies that ended two workers, and when."""

    async def run(self, client: str, work: Callable[[Models, bytes], T], body: bytes) -> T:
        """See Workers."""
        if self._is_deadly(work, body):
            raise _deadly()
        message = wire.packed((work, body))
        for _ in range(_N_TRIES):
            try:
                outcome = await self._attempt(client, message)
            except WorkerDiedError:
                self._check_is_open()
                logger.warning(
                    "A worker ended: %s with a body of %d bytes.", work.__qualname__, len(body)
                )
                continue
            if isinstance(outcome, CorralError):
                raise outcome
            return cast(T, outcome)
        self._deadly[(len(body), _digest(work, body))] = time.monotonic()
        if len(self._deadly) > _DEADLY_KEPT:
            self._deadly.popitem(last=False)
        raise _deadly()

    def _is_deadly(self, work: Work, body: bytes) -> bool:
        """Whether it ended two workers lately. Only bodies of such a length are digested."""
        oldest = time.monotonic() - DEADLY_S
        while self._deadly and next(iter(self._deadly.values())) < oldest:
            self._deadly.popitem(last=False)
        alike = any(length == len(body) for length, _ in self._deadly)
        return alike and (len(body), _digest(work, body)) in self._deadly

    async def _attempt(self, client: str, message: bytes) -> Any:
        """What the work returns, or the CorralError that it raised. Raises WorkerDiedError."""
        async with self._quick.entered(client):
            worker = self._taken() or await self._fork()
            doing = self._begin(worker, message)
            try:
                if await _is_quick(worker, doing):
                    outcome = doing.result()
                    self.at_work.discard(worker)
                    self._idle.append(worker)
                    return outcome
            except BaseException:
                self._end(worker, doing)
                raise
            goes_on = self._slow.try_enter()
        if goes_on:
            return await self._slowly(worker, doing)
        self._end(worker, doing)  # it begins again when there is a place
        if self._slow.n_waiting(client) >= MAX_SLOW_WAITING:
            raise _too_busy()
        await self._slow.enter(client)
        return await self._begin_slowly(message)

    async def _begin_slowly(self, message: bytes) -> Any:
        try:
            worker = await self._fork()
        except BaseException:
            self._slow.leave()
            raise
        return await self._slowly(worker, self._begin(worker, message))

    async def _slowly(self, worker: Worker, doing: asyncio.Future[Any]) -> Any:
        """The work's outcome; its place for slow work is free then."""
        try:
            worker.slow_down()
            async with asyncio.timeout(WALL_S):
                return await doing
        except TimeoutError:
            raise _too_busy() from None
        finally:
            self._end(worker, doing)
            self._slow.leave()

    def _taken(self) -> Worker | None:
        """An idle worker, if there is one. Those that have died are left out."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                return worker
            worker.end()
        return None

    def _begin(self, worker: Worker, message: bytes) -> asyncio.Future[Any]:
        self.at_work.add(worker)
        return asyncio.ensure_future(worker.do(message))

    def _end(self, worker: Worker, doing: asyncio.Future[Any]) -> None:
        self.at_work.discard(worker)
        worker.end()
        doing.cancel()

    async def _fork(self) -> Worker:
        """A new worker. It is kept for others if this is cancelled."""
        forking = asyncio.ensure_future(self._forked())
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(self._keep)
            raise

    def _keep(self, forking: asyncio.Future[Worker]) -> None:
        if not forking.cancelled() and forking.exception() is None:
            self._idle.append(forking.result())

    async def _forked(self) -> Worker:
        async with self._forking:
            if (kept := self._taken()) is not None:  # of those who left while they waited for it
                return kept
            try:
                return await self._zygote.fork()
            except EOFError:
                self._check_is_open()
                logger.warning(
                    "The process that workers are forked from ended. It is started again."
                )
                self._zygote.close()
                self._zygote = Zygote(self._start)
                return await self._zygote.fork()

    @property
    def n_idle(self) -> int:
        """Workers that wait for work."""
        return len(self._idle)

    @property
    def zygote_process(self) -> subprocess.Popen[bytes]:
        """The process that workers are forked from."""
        return self._zygote.process

    async def close(self) -> None:
        """End all processes. What is still at work raises EngineClosedError. Idempotent."""
        self._is_closed = True
        self._zygote.close()
        for worker in (*self._idle, *self.at_work):
            worker.end()
        self._idle.clear()

    def _check_is_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("This server is being stopped.")


async def _is_quick(worker: Worker, doing: asyncio.Future[Any]) -> bool:
    """Wait until the work is done, has taken QUICK_S, or is stuck."""
    began, stuck_at = worker.cpu_s(), time.monotonic() + STUCK_S
    while not doing.done():
        left = QUICK_S - (worker.cpu_s() - began)
        if left <= 0 or time.monotonic() >= stuck_at:
            return False
        await asyncio.wait([doing], timeout=max(left, _LEAST_WAIT_S))
    return True


def _digest(work: Work, body: bytes) -> bytes:
    digest = blake2b(f"{work.__module__}.{work.__qualname__} ".encode(), digest_size=16)
    digest.update(body)
    return digest.digest()


def _deadly() -> InvalidRequestError:
    return InvalidRequestError(
        "This request cannot be read: twice, it crashed the process that reads requests, or took more than "
        f"{CPU_S:.0f} seconds of CPU time there."
    )


def _too_busy() -> QueueFullError:
    return QueueFullError("Too many large requests are being read.", _BUSY_RETRY_S)
