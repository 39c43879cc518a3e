"""The engine replicas' reports to an ingress, and the channels that bring them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from serve_app.channel.protocol import Address
from serve_app.channel.score import Report

logger = logging.getLogger("corral.routing")

_decoder = msgspec.msgpack.Decoder(Report)


class ReplicaConnection:
    """Receives the reports of one replica over one connection."""

    def __init__(self, reports: Reports, replica_id: str) -> None:
        self._reports = reports
        self.replica_id = replica_id
        self.newest: tuple[Report, float] | None = None

    def take(self, report: bytes) -> None:
        """Take a report, as MessagePack. Fields that this version does not know are left out: while Corral
        is updated, versions meet. Raises msgspec.MsgspecError if it is none."""
        self.newest = _decoder.decode(report), time.monotonic()

    def end(self) -> None:
        self._reports.on_leave(self)


class Reports:
    """The newest report of each replica that has a channel to this process.

    Any thread may read. Everything else is for one thread, the listener's.
    """

    def __init__(self) -> None:
        self.address: Address | None = None
        """The address where this process listens; None if it is no ingress's."""
        self._connections: dict[str, ReplicaConnection] = {}

    def connection(self, replica_id: str) -> ReplicaConnection:
        """Return a new connection of that replica. If an older one is left, it counts no more."""
        connection = self._connections[replica_id] = ReplicaConnection(self, replica_id)
        return connection

    def on_leave(self, connection: ReplicaConnection) -> None:
        """A connection is gone, and with it what was heard over it."""
        if self._connections.get(connection.replica_id) is connection:
            del self._connections[connection.replica_id]

    def hears(self, replica_id: str) -> bool:
        """Whether that replica has a channel to this process."""
        return replica_id in self._connections

    def newest(self, replica_id: str) -> tuple[Report, float] | None:
        connection = self._connections.get(replica_id)
        return None if connection is None else connection.newest


HERE = Reports()
"""The reports of this process. Serve makes the routers, and nothing can be handed to them."""


_ANSWER_S = 10.0
"""Longest wait for an answer: connections take half of it at most."""
_AGAIN_S, _AGAIN_MOST_S = 1.0, 30.0
"""The pause between two looks at a replica, and the longest pause between two questions in vain: each is
twice the one before."""

ReplicaT = TypeVar("ReplicaT")


class ReplicaAttachment(Generic[ReplicaT]):
    """Keeps one deployment's replicas attached to this process. Used in one event loop."""

    def __init__(
        self, reports: Reports, ask: Callable[[ReplicaT, Address], Awaitable[object]]
    ) -> None:
        """`ask` has a replica open a channel to an address; it may fail in any way."""
        self._reports = reports
        self._ask = ask
        self._replicas: dict[str, ReplicaT] = {}
        self._keeping: dict[str, asyncio.Task[None]] = {}

    def update(self, replicas: Mapping[str, ReplicaT]) -> None:
        """Take the present replicas, by their ids."""
        self._replicas = dict(replicas)
        address = self._reports.address
        if address is not None:
            for replica_id in self._replicas.keys() - self._keeping.keys():
                self._keeping[replica_id] = asyncio.create_task(self._keep(replica_id, address))

    async def _keep(self, replica_id: str, address: Address) -> None:
        pause_s = _AGAIN_S
        while replica_id in self._replicas:
            if not self._reports.hears(replica_id):
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        await self._ask(self._replicas[replica_id], address)
                except Exception as error:  # of any kind: it may be lost, and Serve not know it yet
                    logger.debug("%s does not attach itself: %r.", replica_id, error)
            if self._reports.hears(replica_id):
                pause_s = _AGAIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _AGAIN_MOST_S)
        del self._keeping[replica_id]
