"""The process of one model: a replica, whose methods the server calls over a socket that it inherits.

    python -m serve_app.run.local.engine FD

It ends when the other end of the socket does, or its engine fails; signals are for the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvloop

from serve_app.base import heap, logs, metrics
from serve_app.base.errors import CorralError
from serve_app.config.resolved import ResolvedModel
from serve_app.run.local.calls import Answer, Connection
from serve_app.run.replica.loaded_model import LoadedModel
from serve_app.run.replica.on_demand import OnDemandModel
from serve_app.run.replica.place import ReplicaPlace
from serve_app.store import shared_entries

METHODS = frozenset(
    {
        *("generate", "embed", "media_tokens", "is_there", "release", "attach"),
        *("load_adapter", "unload_adapter", "stats", "explain", "act_on_slot"),
    }
)
"""The methods that a server may call beside `start` and `ping`."""
_HEALTH_EVERY_S = 2.0
_END_S = 5.0
"""The longest time that unloading may take when the server is gone."""

logger = logging.getLogger("corral.replica")


class EngineProcess:
    """The replica of this process, from its start on. Used in one event loop."""

    def __init__(self) -> None:
        self._replica: LoadedModel | OnDemandModel | None = None
        self.gone = asyncio.Event()

    def answer(self, method: str) -> Answer:
        """The method of that name. Raises KeyError."""
        if method in ("start", "ping"):
            own: Answer = getattr(self, method)
            return own
        if method not in METHODS:
            raise KeyError(method)
        answer: Answer = getattr(self._replica, method)
        return answer

    async def start(
        self,
        model: ResolvedModel,
        replica_id: str,
        folder: str,
        reserved_cpus: float,
        measures_again: bool,  # by its place
    ) -> None:
        """Load the model, or be ready to. Raises CorralError."""
        logs.write_to_stderr(keeps_texts=model.data_at_rest)
        place = ReplicaPlace(
            *("corral", model.id, replica_id, "local", Path(folder), reserved_cpus),
            measures_again=measures_again,
        )
        if model.on_demand is None:
            self._replica = await LoadedModel.load(model, place)
        else:
            self._replica = OnDemandModel(model, place)
        self._watching = asyncio.create_task(self._watch())

    async def ping(self) -> None:
        """Return: the process runs, whatever its engine computes or loads."""

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            if self._replica is not None:
                self._replica.check_health()  # ends the process if the engine failed

    async def leave(self) -> None:
        """Unload the model."""
        if self._replica is not None:
            try:
                async with asyncio.timeout(_END_S):
                    await self._replica.leave()
            except (CorralError, TimeoutError) as error:
                logger.warning("The model is not wholly unloaded: %r.", error)


async def run_engine(connection: socket.socket) -> None:
    """Answer calls until the other end is gone."""
    process = EngineProcess()
    await asyncio.get_running_loop().create_unix_connection(
        lambda: Connection(process.answer, process.gone.set), sock=connection
    )
    await process.gone.wait()
    await process.leave()


def main() -> None:
    """Run until the server is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    heap.give_back()
    descriptor, folder = int(sys.argv[1]), Path(sys.argv[2])
    metrics.keep_in(folder / "metrics")
    shared_entries.keep_in(folder / "entries")
    uvloop.run(run_engine(socket.socket(fileno=descriptor)))
    os._exit(0)  # threads that still compute are not waited for


if __name__ == "__main__":
    main()
