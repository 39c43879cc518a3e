"""The server's side of a model's process: it is started, called, and started again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_app.base.errors import (
    ConfigError,
    CorralError,
    EngineClosedError,
    EngineFailedError,
    EngineUnavailableError,
)
from serve_app.base.heap import HUGE_PAGES
from serve_app.base.values.replicas import FetchingReplica
from serve_app.channel import processes
from serve_app.channel.protocol import Address
from serve_app.config.resolved import ResolvedModel
from serve_app.config.serve_options import RayServeOptions
from serve_app.run.local.calls import Connection
from serve_app.run.replica.reporting import lost_replicas
from serve_app.store.shared_entries import fetching_replicas

logger = logging.getLogger("corral.local")

_PAUSES_S = (0.0, 1.0, 5.0, 15.0, 30.0)
"""The pauses before a process is started again. The last one stays."""
_FIRST_STARTS = 3
"""A model that so many processes could not load is given up, if none has served it before."""
_STEADY_S = 60.0
"""A process that has served for so long is started again at once."""
_LOOK_EVERY_S = 0.05
_END_S = 10.0
"""The longest time that a process may take to end."""
NO_OPTIONS = RayServeOptions()


class EngineChild:
    """A process that was started for an engine, and the socket that leads to it."""

    def __init__(self, folder: Path) -> None:
        own, theirs = socket.socketpair()
        own.setblocking(False)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "serve_app.run.local.engine"),
                    *(str(theirs.fileno()), str(folder)),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=HUGE_PAGES | os.environ,
            )
        self.socket = own

    def kill(self) -> None:
        """End the process now."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


class LocalHandle:
    """The ReplicaHandle of a model that one process of this server has. Used in one event loop.

    As Serve does, it asks the process every `health_check_period_s` whether it runs. One that is silent for
    `health_check_timeout_s` is killed, and another one is started.
    """

    def __init__(
        self,
        model: ResolvedModel,
        folder: Path,
        reserved_cpus: float,
        options: RayServeOptions = NO_OPTIONS,
    ) -> None:
        self._model, self._folder, self._reserved_cpus = model, folder, reserved_cpus
        self._options = options
        self._connection: Connection | None = None
        self._replica_id = ""
        self._lost = lost_replicas(model.id)
        self._is_up, self._up_at = False, 0.0
        self.failure: CorralError | None = None
        """The reason why the model cannot be loaded, if the last process could not."""
        self._is_known = asyncio.Event()
        """Set while the model is up, or cannot be: calls wait for it."""
        self._is_closing = False
        self._address: Address | None = None

    async def keep(self, child: EngineChild) -> None:
        """Load the model in a process, and in another one whenever that is lost, until this is cancelled.
        Raises CorralError if the model cannot be served: the first process says so, or the first ones
        fail. Calls get that as an EngineUnavailableError."""
        n_failed, was_up = 0, False
        while True:
            try:
                await self._serve(child, measures_again=not was_up)
                self._lost.inc()
            except CorralError as error:
                is_last = isinstance(error, ConfigError) or n_failed + 1 >= _FIRST_STARTS
                if is_last:
                    self.fail(error)
                if is_last and not was_up:
                    logger.error("The model %s is left out: %s", self._model.id, error)
                    raise
                logger.error("Model %s: its process cannot load it: %s", self._model.id, error)
            finally:
                was_up = was_up or self._is_up
                was_steady = self._is_up and time.monotonic() - self._up_at > _STEADY_S
                self._connection, self._is_up = None, False
                if self.failure is None:
                    self._is_known.clear()
                await asyncio.to_thread(_wait_for_end, child)
            n_failed = 1 if was_steady else n_failed + 1
            pause_s = _PAUSES_S[min(n_failed, len(_PAUSES_S)) - 1]
            status = child.process.returncode
            logger.error(
                "Model %s: its process has ended (status %s), and is started again in %g s.",
                self._model.id,
                status,
                pause_s,
            )
            child = await self._start_again(pause_s)

    async def _start_again(self, pause_s: float) -> EngineChild:
        """Start another process, after a pause, as soon as there can be one."""
        while True:
            await _pause(pause_s)
            try:
                return EngineChild(self._folder)
            except OSError as error:  # no memory, no descriptor, or too many processes
                self.fail(EngineUnavailableError(f"no process can be started: {error.strerror}"))
                logger.error("Model %s: no process can be started: %s", self._model.id, error)
                pause_s = _PAUSES_S[-1]

    async def _serve(self, child: EngineChild, *, measures_again: bool) -> None:
        """Returns when the process is lost. Raises CorralError if it cannot load the model."""
        lost = asyncio.Event()

        def refuse(method: str) -> Any:
            raise KeyError(method)

        _, connection = await asyncio.get_running_loop().create_unix_connection(
            lambda: Connection(refuse, lost.set), sock=child.socket
        )
        self._replica_id = f"{self._model.id}-{child.process.pid}"
        watching = asyncio.create_task(self._watch(connection, child))
        try:
            names = self._replica_id, str(self._folder)
            start = self._model, *names, self._reserved_cpus, measures_again
            outcome = await connection.call("start", *start)
            if isinstance(outcome, CorralError):
                self.fail(outcome)
                raise outcome
            self._connection = connection
            if self._address is not None:
                await connection.call("attach", self._address)
            self.failure, self._is_up, self._up_at = None, True, time.monotonic()
            self._is_known.set()
            await lost.wait()
        finally:
            watching.cancel()
            connection.close()

    async def _watch(self, connection: Connection, child: EngineChild) -> None:
        """Kill the process if it hangs: its calls fail then, and go on elsewhere."""
        pid, timeout_s = child.process.pid, self._options.health_check_timeout_s
        while True:
            await asyncio.sleep(self._options.health_check_period_s)
            ping = asyncio.create_task(connection.call("ping"))
            ping.add_done_callback(lambda done: done.cancelled() or done.exception())
            if not await processes.answers(ping, pid, timeout_s):
                logger.error(
                    "Model %s: its process %d is killed: it was silent for %g s.",
                    *(self._model.id, pid, timeout_s),
                )
                child.process.kill()
            await asyncio.wait([ping])
            if ping.exception() is not None:
                return  # the process is lost

    def fail(self, error: CorralError) -> None:
        """Have calls fail with this error until the model is up again."""
        self.failure = error
        self._is_known.set()

    def call(self, method: str, *arguments: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self._call(method, *arguments))

    async def _call(self, method: str, *arguments: Any) -> Any:
        await self._is_known.wait()
        if self.failure is not None:
            raise EngineUnavailableError(f"The model cannot be loaded: {self.failure}")
        if self._connection is None:
            raise EngineFailedError("The engine's process is lost.")
        return await self._connection.call(method, *arguments)

    def running(self) -> frozenset[str]:
        return frozenset({self._replica_id} if self._is_up else ())

    async def ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        answer = await self.ask_one(method, *arguments, timeout_s=timeout_s)
        return [] if answer is None else [answer]

    async def ask_one(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if self._connection is None:
            return None
        with suppress(EngineFailedError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._connection.call(method, *arguments)
        return None

    async def replica_states(self) -> dict[str, int]:
        if self._is_closing:
            raise EngineClosedError("The server is being stopped.")
        return {"RUNNING" if self._is_up else "STARTING": 1}

    async def fetching(self) -> Sequence[FetchingReplica]:
        return await asyncio.to_thread(fetching_replicas, "corral", self._model.id)

    async def attach(self, address: Address) -> None:
        """Have the replica, whenever there is one, tell that ingress what it holds."""
        self._address = address
        if self._connection is not None:
            await self._connection.call("attach", address)

    async def quiet(self, limit_s: float) -> None:
        """Wait until the process answers no call, for so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._connection is not None and self._connection.n_calls:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)

    def drain(self) -> None:
        """The server is being stopped: endless streams end."""
        self._is_closing = True


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _wait_for_end(child: EngineChild) -> None:
    """Wait until the process has ended, and see to it that it does."""
    child.socket.close()
    try:
        child.process.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()


def folder_for(app_folder: Path) -> Path:
    """The folder with what the processes of a server share, made anew."""
    for part in ("metrics", "entries"):
        os.makedirs(app_folder / part)  # noqa: PTH103
    return app_folder
