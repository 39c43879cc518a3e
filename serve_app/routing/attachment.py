"""Asks engine replicas to open a channel to this ingress, and asks again when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from serve_app.channel.address import Address
from serve_app.routing.reports import Reports

logger = logging.getLogger("corral.routing")

_ANSWER_S = 10.0
"""Longest wait for an answer: connections take half of it at most."""
_AGAIN_S, _AGAIN_MOST_S = 1.0, 30.0
"""Pauses after one that has not come of it: the first, and the longest; each is twice the one before."""

ReplicaT = TypeVar("ReplicaT")


class ReplicaAttachment(Generic[ReplicaT]):
    """Keeps one deployment's replicas attached to this process. Used in one event loop."""

    def __init__(
        self, reports: Reports, ask: Callable[[ReplicaT, Address], Awaitable[object]]
    ) -> None:
        """`ask` has a replica open a channel to an address; it may fail in any way."""
        self._reports = reports
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._replicas: dict[str, ReplicaT] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        reports.watch(self._left)

    def update(self, replicas: Mapping[str, ReplicaT]) -> None:
        """Take the present replicas, by their ids."""
        self._replicas = dict(replicas)
        for replica_id in self._replicas:
            self._attach(replica_id)

    def _left(self, replica_id: str) -> None:
        """Any thread: its connection is gone."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._attach, replica_id)

    def _is_missing(self, replica_id: str) -> bool:
        return replica_id in self._replicas and not self._reports.hears(replica_id)

    def _attach(self, replica_id: str) -> None:
        """Ask it, unless it is attached or being asked already."""
        address = self._reports.address
        if address is None or replica_id in self._asking or not self._is_missing(replica_id):
            return

        def asked(_: object) -> None:
            del self._asking[replica_id]
            self._attach(replica_id)  # if the channel broke meanwhile

        task = self._loop.create_task(self._keep_asking(replica_id, address))
        self._asking[replica_id] = task
        task.add_done_callback(asked)

    async def _keep_asking(self, replica_id: str, address: Address) -> None:
        pause_s = _AGAIN_S
        while self._is_missing(replica_id):
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await self._ask(self._replicas[replica_id], address)
            except Exception as error:  # of any kind: it may be lost, and Serve not know it yet
                logger.debug("%s does not attach itself: %r.", replica_id, error)
            if self._is_missing(replica_id):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MOST_S)
