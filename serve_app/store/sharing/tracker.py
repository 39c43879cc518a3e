"""The cluster's tracker: one process that keeps the swarms of all files that are fetched.

It is started by the first node that fetches a file, and ends when nobody has for a while. It keeps nothing
that nodes cannot tell it again: if it dies, Ray starts it on another node, and nodes join once more.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from serve_app.store.pieces import Take
from serve_app.store.sharing import NAMESPACE, holders
from serve_app.store.sharing.swarm import Swarm

logger = logging.getLogger("corral.store")

WAIT_S = 2.0
"""A node that can have nothing now waits so long for its answer."""
IDLE_S = 60.0
_LOOK_EVERY_S = 3.0
_NAME = "downloads"
_QUIET_S = 5.0
"""A tracker that follows one that died lets nodes join for so long before it hands out pieces."""


@dataclass(frozen=True, slots=True)
class PieceAnswer:
    """The piece that a node may fetch."""

    is_member: bool
    """If not, it must join."""
    take: Take | None = None
    """None: nothing now; ask again."""


class TrackerActor:
    """Its methods run in the actor's event loop."""

    def __init__(self) -> None:
        with warnings.catch_warnings(
            action="ignore"
        ):  # Ray asks itself what it wants nobody to ask
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._quiet_until = time.monotonic() + _QUIET_S if restarted else 0.0
        self._swarms: dict[str, Swarm] = {}
        self._changed = asyncio.Event()
        self._asked = time.monotonic()
        self._watching: asyncio.Task[None] | None = None

    async def join(
        self, key: str, node: str, path: str, have: bytes, fetching: Sequence[int]
    ) -> None:
        """See Swarm."""
        self._asked = time.monotonic()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        if key not in self._swarms:
            swarm = Swarm(len(have))
            await self._look(key, swarm)
            self._swarms.setdefault(key, swarm)
        self._swarms[key].join(node, path, have, fetching, time.monotonic())
        self._tell()

    async def next(self, key: str, node: str, getting: Sequence[int]) -> PieceAnswer:
        """See Swarm; waits a moment if there is nothing for this node."""
        self._asked = time.monotonic()
        deadline = self._asked + WAIT_S
        while (swarm := self._swarms.get(key)) is not None and swarm.is_member(node):
            now = time.monotonic()
            changed = self._changed
            if now >= self._quiet_until:
                take = swarm.next(node, getting, now)
                if take is not None or now >= deadline:
                    return PieceAnswer(True, take)
            elif now >= deadline:
                return PieceAnswer(True)
            try:
                async with asyncio.timeout(max(0.0, deadline - now)):
                    await changed.wait()
            except TimeoutError:
                pass
        return PieceAnswer(False)

    async def renew(self, key: str, node: str, piece: int) -> None:
        """See Swarm."""
        if (swarm := self._swarms.get(key)) is not None:
            swarm.renew(node, piece, time.monotonic())

    async def done(self, key: str, node: str, piece: int) -> None:
        """See Swarm."""
        if (swarm := self._swarms.get(key)) is not None:
            swarm.done(node, piece, time.monotonic())
            self._tell()

    async def failed(
        self, key: str, node: str, piece: int, holder: str | None, is_gone: bool
    ) -> None:
        """See Swarm. `is_gone`: the holder has the file no more, or is there no more."""
        if (swarm := self._swarms.get(key)) is None:
            return
        swarm.failed(node, piece, holder, time.monotonic())
        if holder is not None and is_gone:
            swarm.forget(holder)
            await asyncio.to_thread(holders.remove, key, holder)
        self._tell()

    async def leave(self, key: str, node: str, forget: bool) -> None:
        """See Swarm."""
        if (swarm := self._swarms.get(key)) is not None:
            swarm.forget(node) if forget else swarm.leave(node)
            self._tell()

    def _tell(self) -> None:
        """Those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look(self, key: str, swarm: Swarm) -> None:
        """Learn which nodes have all of it."""
        try:
            found = await asyncio.to_thread(holders.read, key)
        except Exception as error:  # Ray's head is away for a moment
            logger.warning("Which nodes have files is not known: %r.", error)
            return
        for node, path in found.items():
            swarm.hold(node, path)

    async def _watch(self) -> None:
        """Until nobody has asked for long."""
        while time.monotonic() - self._asked < IDLE_S:
            await asyncio.sleep(_LOOK_EVERY_S)
            for key, swarm in [*self._swarms.items()]:
                if swarm.is_active(time.monotonic()):
                    await self._look(key, swarm)
            self._tell()
        ray.get_runtime_context().current_actor.end.remote()

    async def end(self) -> None:
        """End this process, unless somebody came meanwhile."""
        if time.monotonic() - self._asked < IDLE_S:
            self._watching = asyncio.create_task(self._watch())
            return
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def made() -> Any:
    """The actor, started if it must be. Asks Ray's head. Raises RayError or ValueError."""
    options: dict[str, Any] = {
        "name": _NAME,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 10_000,
    }
    actor: Any = ray.remote(TrackerActor)
    return actor.options(**options).remote()
