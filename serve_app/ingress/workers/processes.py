"""A worker and the zygote, from the ingress's side: how they are started, asked and ended."""

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
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from serve_app.errors import CorralError, EngineUnavailableError
from serve_app.ingress.workers import stack, wire, zygote
from serve_app.ingress.workers.wire import Outcome
from serve_app.ingress.workers.worker import Changes, Work
from serve_app.ingress.workers.zygote import NO_PID, PID, Start

NICENESS = 10
"""The addition to the niceness of workers that read long prompts. Beside a thread that decodes, they get a
tenth of a core."""
_ENVIRONMENT = {
    "GGML_NO_BACKTRACE": "1",  # llama.cpp would start a debugger when it gives up
    "OPENBLAS_NUM_THREADS": "1",  # threads do not survive a fork
}


logger = logging.getLogger("corral.ingress")


class WorkerDiedError(Exception):
    """A worker is gone, and its work is undone."""

    def __init__(self, cpu_s: float = 0.0) -> None:
        """`cpu_s`: what the work was seen to take."""
        super().__init__(cpu_s)
        self.cpu_s = cpu_s


class Worker:
    """One process, from the ingress's side. Event loop only."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self.is_idle_priority = self.is_niced = False
        self._cpu_s = 0.0
        self._pidfd = os.pidfd_open(pid)  # a number alone may be another process's later
        self._reader = reader
        self._writer = writer

    async def do(self, work: Work, pieces: Sequence[bytes], changes: Changes) -> Outcome:
        """The result, or the CorralError that the work raised, with these changes of the models that the
        zygote knows. Raises WorkerDiedError."""
        began_s = self.cpu_s()
        try:
            await wire.send(self._writer, work, pieces, changes)
            return await wire.received(self._reader, wire.result_type(work))
        except (EOFError, ConnectionError, msgspec.MsgspecError) as error:
            if isinstance(error, msgspec.MsgspecError):
                logger.exception("A worker sent something else than a result.")
            raise WorkerDiedError(self.cpu_s() - began_s) from error

    def is_alive(self) -> bool:
        """Whether its process runs."""
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

    def __init__(self, start: Start) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", stack.__name__, zygote.__name__, str(fd)]
            path = os.pathsep.join(filter(None, sys.path))
            self.process = subprocess.Popen(
                command, pass_fds=[fd], env=os.environ | {"PYTHONPATH": path} | _ENVIRONMENT
            )
        self._control.sendall(wire.packed(start))
        self._control.setblocking(False)
        self._reader: asyncio.StreamReader | None = None

    async def fork(self) -> Worker:
        """A new worker. Raises CorralError if there can be none, WorkerDiedError if it is gone again, and
        EOFError if the zygote is gone."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._control)
            refusal = await wire.received(self._reader, None)
            if isinstance(refusal, CorralError):
                raise refusal
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            (pid,) = PID.unpack(await self._reader.readexactly(PID.size))
        except (OSError, asyncio.IncompleteReadError) as error:
            ours.close()
            raise EOFError from error
        if pid == NO_PID:
            ours.close()
            raise EngineUnavailableError("No process can be started to read this request.")
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            return Worker(pid, reader, writer)
        except OSError as error:  # it is gone, or there is no descriptor for it
            writer.close()
            raise WorkerDiedError from error

    def close(self) -> None:
        """End it; its workers end when they have nothing to do. Idempotent."""
        self.process.kill()
        self.process.wait()
        if self._reader is None:
            self._control.close()
        else:
            self._writer.close()
