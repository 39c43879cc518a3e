"""The workers of one ingress replica: started, bounded, and replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import msgspec

from serve_app.base.errors import (
    CorralError,
    EngineClosedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from serve_app.base.folders import search_path
from serve_app.channel import processes
from serve_app.channel.protocol import frame_body
from serve_app.config.serve_options import RayServeOptions
from serve_app.server.http import request_context
from serve_app.server.model_registry import ModelFile, ModelInfo, Models, NumberedAdapters
from serve_app.server.workers import wire
from serve_app.server.workers.fair_semaphore import FairSemaphore
from serve_app.server.workers.wire import Outcome, Piece, WorkOrder
from serve_app.server.workers.worker import (
    CPU_S,
    NO_FILES,
    NO_PID,
    PID,
    PING,
    Start,
    fork_worker,
    nothing,
)

NICENESS = 10
"""The addition to the niceness of workers that read long prompts. Beside a thread that decodes, they get a
tenth of a core."""

logger = logging.getLogger("corral.ingress")

T = TypeVar("T")

SMALL_BYTES, QUICK_BYTES = 16 * 2**10, 512 * 2**10
"""Bodies of more than SMALL_BYTES are read at a lower priority. They have workers of their own, as they may
well end a worker. They have places of their own, as each may take ten times as long as a small one. Bodies
of more than QUICK_BYTES take a place for slow work from the start."""
QUICK_S, QUICK_BYTE_S = 0.02, 0.4e-6
"""CPU seconds of quick work: so many in all, and so many for each byte of the body up to QUICK_BYTES. Long
prompts and most pictures take no more. Slower work gets what others leave of the processors, and frees its
place for the next."""
LEFT_S = 0.05
"""The longest time that a small body whose client has left keeps its worker."""
STUCK_S = 10.0
"""Seconds after which work counts as slow, however little of the processor it took."""
WALL_S = 120.0
"""Longest time that a request's work may take, however little of the processor it gets."""
MAX_SLOW_WAITING = 8
"""Requests of one client that may wait for a place for slow work."""

_N_TRIES = 2
_BUSY_RETRY_S = 10
_LEAST_WAIT_S = 0.005
# How often a slow worker's CPU time is looked at: it may have taken that much more when it dies.
_LOOK_S = 0.25


class WorkerDiedError(Exception):
    """A worker is gone, and its work is undone."""

    def __init__(self, cpu_s: float = 0.0) -> None:
        """`cpu_s`: what the work was seen to take."""
        super().__init__(cpu_s)
        self.cpu_s = cpu_s


@dataclass(frozen=True, slots=True)
class _Job:
    """Work for a client, as it is sent to a worker."""

    client: str
    order: WorkOrder
    pieces: Sequence[Piece]
    """The pieces of the body, and the files that were fetched for it."""
    result_type: Any


_PING = _Job("", WorkOrder(wire.name_of(nothing), 0), (), wire.result_type(nothing))


class Worker:
    """A worker process, from the ingress's side. Event loop only."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, zygote: Zygote
    ) -> None:
        self.pid, self.zygote = pid, zygote
        self.is_idle_priority = self.is_niced = False
        self._cpu_s = 0.0
        self._pidfd = os.pidfd_open(pid)  # a number alone may be another process's later
        self._reader, self._writer = reader, writer
        self.doing: asyncio.Future[Outcome]

    def begin(self, job: _Job) -> None:
        """Have it do this: `doing` is the result, or the work's CorralError. Raises WorkerDiedError."""
        self.doing = asyncio.ensure_future(self._do(job))

    async def _do(self, job: _Job) -> Outcome:
        began_s = self.cpu_s()
        try:
            await wire.send(self._writer, job.order, job.pieces)
            return await wire.receive_outcome(self._reader, job.result_type)
        except (EOFError, ConnectionError, msgspec.MsgspecError) as error:
            if isinstance(error, msgspec.MsgspecError):
                logger.exception("A worker sent something else than a result.")
            raise WorkerDiedError(self.cpu_s() - began_s) from error

    async def is_quick(self, most_s: float) -> bool:
        """Wait until the work is done, has taken so many CPU seconds, or is stuck."""
        began, stuck_at = self.cpu_s(), time.monotonic() + STUCK_S
        while not self.doing.done():
            left = most_s - (self.cpu_s() - began)
            if left <= 0 or time.monotonic() >= stuck_at:
                return False
            await asyncio.wait([self.doing], timeout=max(left, _LEAST_WAIT_S))
        return True

    @property
    def has_finished(self) -> bool:
        """Whether the work is done, and the process can do more at its priority."""
        is_done = self.doing.done() and not self.doing.cancelled() and not self.doing.exception()
        return is_done and not self.is_idle_priority

    def is_alive(self) -> bool:
        if self._pidfd < 0:
            return False
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)  # see pidfd_open(2)
        return not ended.poll(0)

    def cpu_s(self) -> float:
        """CPU seconds that it has taken so far; what it took last if it is gone."""
        with suppress(OSError):
            # Linux makes the clock of a process of its number: clock_getcpuclockid(3).
            self._cpu_s = time.clock_gettime((~self.pid << 3) | 2)
        return self._cpu_s

    def renice(self) -> None:
        """Give the process less of the processors than others have. That cannot be undone. Idempotent."""
        if self.is_niced:
            return
        self.is_niced = True
        with suppress(ProcessLookupError):
            niceness = os.getpriority(os.PRIO_PROCESS, self.pid)
            os.setpriority(os.PRIO_PROCESS, self.pid, min(19, niceness + NICENESS))

    def set_idle_priority(self) -> None:
        """Give the process what others leave of the processors. That cannot be undone. Idempotent."""
        if self.is_idle_priority:
            return
        self.is_idle_priority = True
        with suppress(ProcessLookupError):
            os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))

    def end(self) -> None:
        """End it now. Idempotent."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = -1
            self._writer.close()


class Zygote:
    """The process that workers are forked from. Event loop only, but for the constructor."""

    def __init__(self, start: Start, models: Models | None = None) -> None:
        """Start it, or fork it from this process, which has read `models` and knows no client yet."""
        self._control, theirs = socket.socketpair()
        self._end: list[Callable[[], object]]  # the last one first
        with theirs:
            if models is None:
                command = [sys.executable, "-m", fork_worker.__module__, str(theirs.fileno())]
                # OpenBLAS's threads would not survive the forks.
                environment = os.environ | {
                    "PYTHONPATH": search_path(),
                    "OPENBLAS_NUM_THREADS": "1",
                }
                started = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
                self.pid, self._end = started.pid, [started.wait, started.kill]
            else:
                pid = self.pid = fork_worker(theirs.fileno(), models)
                self._end = [partial(os.waitpid, pid, 0), partial(os.kill, pid, signal.SIGKILL)]
        self._control.sendall(frame_body(msgspec.msgpack.encode(start)))
        self._control.setblocking(False)
        self._reader: asyncio.StreamReader | None = None

    async def _ready(self) -> asyncio.StreamReader:
        """The stream that answers come from, when it has read the models. Raises CorralError and
        EOFError."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._control)
            refusal = await wire.receive_outcome(self._reader, None)
            if isinstance(refusal, CorralError):
                raise refusal
        return self._reader

    async def ping(self) -> None:
        """Returns when it has answered. Raises CorralError, and EOFError if the zygote is gone."""
        reader = await self._ready()
        try:
            self._writer.write(PING)
            await reader.readexactly(PID.size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EOFError from error

    async def fork(self) -> Worker:
        """A new worker. Raises CorralError if there can be none, WorkerDiedError if it is gone again, and
        EOFError if the zygote is gone."""
        reader = await self._ready()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            (pid,) = PID.unpack(await reader.readexactly(PID.size))
            if pid == NO_PID:
                raise EngineUnavailableError("No process can be started to read this request.")
            of_worker, writer = await asyncio.open_connection(sock=ours)
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError | asyncio.IncompleteReadError):
                raise EOFError from error
            raise
        try:
            return Worker(pid, of_worker, writer, self)
        except OSError as error:  # it is gone, or there is no descriptor for it
            writer.close()
            raise WorkerDiedError from error

    def close(self) -> None:
        """End it; its workers end when they have nothing to do. Idempotent."""
        while self._end:  # once: the number may be another process's later
            self._end.pop()()
        if self._reader is None:
            self._control.close()
        else:
            self._writer.close()


class Workers(Protocol):
    """The workers that read clients' bodies."""

    async def run(
        self,
        client: str,
        work: Callable[[Models, Any], T],
        *pieces: Piece,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> T:
        """The result of `work` for the body that these pieces are, and the files that were fetched for it.
        `work` must be importable by its name. The ignored fields are added to this task's caller.

        Raises CorralError: what `work` raises; InvalidRequestError if it crashed two workers, or took all
        the time that one has; QueueFullError if too much of this client waits. Cancelling it ends the work.
        """


class WorkerPool:
    """Workers that are forked from one process, which has read the models' vocabularies. Event loop only.

    `n_quick` requests with small bodies are worked on at once, and as many with larger ones. `n_slow`
    places, one for each client, are for very large bodies, bodies that ended a worker, and work that takes
    longer than its size explains. Slow work gets little of the processor. Clients take turns at the places.
    """

    def __init__(
        self,
        models: Sequence[ModelFile],
        modules: Sequence[str],
        read: Callable[[ModelFile], ModelInfo] = ModelInfo.open,
        *,
        n_quick: int = 2,
        n_slow: int = 2,
        keeps_texts: bool = True,
        opened: Models | None = None,
        options: RayServeOptions = RayServeOptions(),  # noqa: B008  # is frozen
    ) -> None:
        """Start the zygote. It imports the modules, and reads the vocabularies by `read`, a function that
        can be imported. Workers start when they are needed. `keeps_texts` says whether their log may have
        clients' texts. With `opened`, the models as `read` has read them here, the first zygote is forked
        from this process and shares its memory. No thread may hold a lock then. A process that is silent
        for the options' `health_check_timeout_s` is replaced."""
        self._options = options
        self._start = Start(tuple(models), tuple(modules), wire.name_of(read), keeps_texts)
        self._zygote = Zygote(self._start, opened)
        self._forking = asyncio.Lock()
        self._n_quick = n_quick
        self._small, self._larger = FairSemaphore(n_quick), FairSemaphore(n_quick)
        self._slow = FairSemaphore(n_slow, most_each=1)
        self._is_closed = False
        self._idle: list[Worker] = []
        self.at_work: set[Worker] = set()
        self.adapters: Mapping[str, NumberedAdapters] = {}
        """The adapters of the models whose adapters have changed since the start."""

    async def run(
        self,
        client: str,
        work: Callable[[Models, Any], T],
        *pieces: Piece,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> T:
        data = (*pieces, *files.values())
        n_bytes, sizes = sum(map(len, data)), tuple((url, len(file)) for url, file in files.items())
        allowed = request_context.current().allowed_models
        order = WorkOrder(wire.name_of(work), n_bytes, self.adapters, sizes, allowed)
        job = _Job(client, order, data, wire.result_type(work))
        is_slow = False
        for _ in range(_N_TRIES):
            try:
                if is_slow or n_bytes > QUICK_BYTES:
                    quick_s = 0.0 if is_slow else _quick_s(n_bytes)
                    outcome = await self._slowly(job, quick_s)
                else:
                    outcome = await self._quickly(job)
            except WorkerDiedError as death:
                self._check_is_open()
                logger.warning("A worker ended: %s with %d bytes.", order.work, n_bytes)
                if death.cpu_s > CPU_S - 2 * _LOOK_S:  # another one would not get any further
                    break
                is_slow = True
                continue
            if isinstance(outcome, CorralError):
                raise outcome
            caller = request_context.current()
            caller.ignored += outcome.ignored
            caller.n_preparing = self._small.n_tasks + self._larger.n_tasks
            return cast(T, outcome.value)
        raise InvalidRequestError(
            "This request cannot be read. It crashed the process that reads requests twice, or took more "
            f"than {CPU_S:.0f} seconds of CPU time there."
        )

    async def _quickly(self, job: _Job) -> Outcome:
        """The result, or the CorralError that the work raised. Raises WorkerDiedError."""
        with ExitStack() as stack:
            is_small = job.order.n_bytes <= SMALL_BYTES
            places = self._small if is_small else self._larger
            async with places.place(job.client):
                worker = self._take_idle(not is_small) or await self._fork(is_niced=not is_small)
                stack.enter_context(self._doing(worker, job))
                try:
                    if await worker.is_quick(_quick_s(job.order.n_bytes)):
                        return worker.doing.result()
                except asyncio.CancelledError:
                    if is_small:  # if it is done soon, it is kept: a new one would cost more
                        await asyncio.wait([worker.doing], timeout=LEFT_S)
                    raise
                goes_on = self._slow.try_enter(job.client)
            if goes_on:
                return await self._go_on_slowly(job, worker)
        return await self._slowly(job, quick_s=0.0)  # it begins again when there is a place

    async def _slowly(self, job: _Job, quick_s: float) -> Outcome:
        """The result, when there is a place for slow work. After `quick_s` CPU seconds the worker gets what
        others leave of the processors."""
        if self._slow.n_waiting(job.client) >= MAX_SLOW_WAITING:
            raise _too_busy()
        await self._slow.enter(job.client)
        try:
            worker = await self._fork(is_niced=True)
        except BaseException:
            self._slow.leave(job.client)
            raise
        with self._doing(worker, job):
            return await self._go_on_slowly(job, worker, quick_s)

    async def _go_on_slowly(self, job: _Job, worker: Worker, quick_s: float = 0.0) -> Outcome:
        """The work's outcome. Frees the place for slow work."""
        try:
            if not await worker.is_quick(quick_s):
                worker.set_idle_priority()
            silent_s = 0.0
            async with asyncio.timeout(WALL_S):
                while not worker.doing.done():
                    await asyncio.wait([worker.doing], timeout=_LOOK_S)
                    worker.cpu_s()
                    silent_s = 0.0 if processes.is_busy(worker.pid) else silent_s + _LOOK_S
                    if silent_s > self._options.health_check_timeout_s:
                        logger.error("A worker was silent for %g s.", silent_s)
                        worker.end()
            return worker.doing.result()
        except TimeoutError:
            raise _too_busy() from None
        finally:
            self._slow.leave(job.client)

    @contextmanager
    def _doing(self, worker: Worker, job: _Job) -> Iterator[None]:
        """A block in which the worker does the job. It is kept afterwards if that was quick, or else
        ended."""
        worker.begin(job)
        self.at_work.add(worker)
        try:
            yield
        finally:
            self.at_work.discard(worker)
            if worker.has_finished and job.order.n_bytes <= QUICK_BYTES:
                self._keep(worker)
            else:
                worker.end()
                worker.doing.cancel()

    def _take_idle(self, is_niced: bool) -> Worker | None:
        for worker in reversed(self._idle):
            if worker.is_niced == is_niced:
                self._idle.remove(worker)
                if worker.is_alive():
                    return worker
                worker.end()
        return None

    def _keep(self, worker: Worker) -> None:
        n_alike = sum(idle.is_niced == worker.is_niced for idle in self._idle)
        if worker.zygote is self._zygote and n_alike < self._n_quick:
            self._idle.append(worker)
        else:
            worker.end()

    async def _fork(self, is_niced: bool) -> Worker:
        """A new or an idle worker of this kind. A cancelled call's worker is kept for others."""
        forking = asyncio.ensure_future(self._take_or_fork(is_niced))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(self._keep_forked)
            raise

    def _keep_forked(self, forking: asyncio.Future[Worker]) -> None:
        if not forking.cancelled() and forking.exception() is None:
            self._keep(forking.result())

    async def _take_or_fork(self, is_niced: bool) -> Worker:
        async with self._forking:
            if (kept := self._take_idle(is_niced)) is not None:
                return kept
            worker = await self._ask_zygote(Zygote.fork)
            if is_niced:
                worker.renice()
            return worker

    async def _ask_zygote(self, ask: Callable[[Zygote], Awaitable[T]]) -> T:
        """The zygote's answer; another one's if it has ended, or hangs. Raises CorralError, also if that
        one is lost; otherwise like `ask`."""
        try:
            return await self._await_answer(self._zygote, ask)
        except EOFError:
            self._check_is_open()
            logger.warning("The process that forks workers has ended. Starting a new one.")
            self._zygote.close()
            try:
                self._zygote = Zygote(self._start)
            except OSError as error:
                message = f"No process can be started to read requests: {error.strerror}."
                raise EngineUnavailableError(message) from error
            return await self._ask_new(self._zygote, ask)

    async def _ask_new(self, zygote: Zygote, ask: Callable[[Zygote], Awaitable[T]]) -> T:
        """The answer of a zygote that was just started. Raises CorralError, also if it is lost."""
        try:
            return await self._await_answer(zygote, ask)
        except EOFError:
            self._check_is_open()
            raise EngineUnavailableError("The process that reads requests is lost.") from None

    async def _await_answer(self, zygote: Zygote, ask: Callable[[Zygote], Awaitable[T]]) -> T:
        answer = asyncio.ensure_future(ask(zygote))
        timeout_s = self._options.health_check_timeout_s
        if not await processes.answers(answer, zygote.pid, timeout_s):
            logger.error("The process that forks workers was silent for %g s.", timeout_s)
            answer.cancel()
            raise EOFError
        return await answer

    async def watch(self) -> None:
        """Ask all processes that have nothing to do every `health_check_period_s` whether they run, and
        replace those that hang. Until it is cancelled."""
        while not self._is_closed:
            await asyncio.sleep(self._options.health_check_period_s)
            try:
                async with self._forking:
                    await self._ask_zygote(Zygote.ping)
                for worker in self._idle.copy():
                    await self._ping(worker)
            except CorralError as error:
                logger.warning("Workers cannot be started: %r.", error)

    async def _ping(self, worker: Worker) -> None:
        if worker not in self._idle:
            return
        self._idle.remove(worker)
        with suppress(WorkerDiedError), self._doing(worker, _PING):
            timeout_s = self._options.health_check_timeout_s
            if await processes.answers(worker.doing, worker.pid, timeout_s):
                worker.doing.result()
            else:
                logger.error("A worker was silent for %g s.", timeout_s)

    async def renew(self, models: Sequence[ModelFile]) -> None:
        """Have workers with these models from now on. Raises CorralError, and those before stay."""
        start = replace(self._start, models=tuple(models))
        zygote = Zygote(start)
        try:
            first = await self._ask_new(zygote, Zygote.fork)
        except BaseException:
            zygote.close()
            raise
        async with self._forking:
            self._zygote.close()
            self._start, self._zygote = start, zygote
            for worker in self._idle:
                worker.end()
            self._idle = [first]

    async def close(self) -> None:
        """End all processes. Work that is still running raises EngineClosedError. Idempotent."""
        self._is_closed = True
        self._zygote.close()
        for worker in (*self._idle, *self.at_work):
            worker.end()
        self._idle.clear()

    def _check_is_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("This server is being stopped.")


def _quick_s(n_bytes: int) -> float:
    return QUICK_S + min(n_bytes, QUICK_BYTES) * QUICK_BYTE_S


def _too_busy() -> QueueFullError:
    return QueueFullError("Too many large requests are being read.", _BUSY_RETRY_S)
