"""The store of responses as a Ray actor, which all ingresses of an application share.

It is started by the first response that is kept, outlives every ingress, and ends when it has kept nothing
for a while. Who never keeps a response has no such process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from serve_app.apis.responses.store import LogAppend, Owner, Store, StoredResponse
from serve_app.base.errors import CorralError
from serve_app.cluster.ray_values import NAMESPACE

logger = logging.getLogger("corral.ingress")

_AT_ONCE = 10_000
"""Calls at once, most of which wait for news."""
_ANSWER_S = 10.0
_LOOK_S, _IDLE_S = 10.0, 60.0
"""The seconds between two looks whether the actor keeps a response, and without one until it ends."""
_RETRY_S = (0.2, 1.0, 3.0)
"""An actor that has just ended is still found by its name for a moment."""
T = TypeVar("T")


class StoreActor:
    """A Store in a process of its own, which ends when it has kept nothing for a while."""

    def __init__(self) -> None:
        self._store = Store()
        self._watching: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of the store's method, or the CorralError that it raises."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            return await getattr(self._store, method)(*arguments)
        except CorralError as error:
            return error

    async def _watch(self) -> None:
        idle_s = 0.0
        while idle_s < _IDLE_S:
            await asyncio.sleep(_LOOK_S)
            idle_s = 0.0 if len(self._store) else idle_s + _LOOK_S
        ray.get_runtime_context().current_actor.leave.remote()

    async def leave(self) -> None:
        """End this process, unless it keeps a response since a moment ago."""
        if len(self._store):
            self._watching = asyncio.create_task(self._watch())
            return
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class RayStore:
    """The ResponseStore in an actor's process. If that is lost, so is all that it had. Used in one event
    loop."""

    is_shared = True

    def __init__(self) -> None:
        self._name = f"responses-{serve.get_replica_context().app_name}"
        self._actor: Any = None
        self._finding = asyncio.Lock()

    async def prepare(self) -> None:
        try:
            await self._start_actor()
        except Exception:
            logger.exception("The store of responses cannot be started")

    async def put(
        self,
        owner: Owner,
        stored_request: bytes,
        log: LogAppend,
        kept_s: float,
        item_ids: Sequence[str] = (),
    ) -> None:
        arguments = owner, stored_request, log, kept_s, item_ids
        for pause_s in _RETRY_S:
            with suppress(ConnectionError):
                await self._call(await self._start_actor(), Store.put, *arguments)
                return
            await asyncio.sleep(pause_s)
        await self._call(await self._start_actor(), Store.put, *arguments)

    async def append(self, appends: Sequence[LogAppend]) -> list[bool]:
        actor = await self._find_actor()
        if actor is None:
            return [False] * len(appends)
        return await self._call(actor, Store.append, appends)

    async def find(
        self, response_id: str, key: str | None, first: int = 0, wait_s: float = 0.0
    ) -> StoredResponse | None:
        return await self._ask(Store.find, response_id, key, first, wait_s, wait_s=wait_s)

    async def find_items(
        self, item_ids: Sequence[str], key: str | None
    ) -> list[StoredResponse] | None:
        return await self._ask(Store.find_items, item_ids, key)

    async def delete(self, response_id: str, key: str | None) -> bool | None:
        return await self._ask(Store.delete, response_id, key)

    async def cancel(self, response_id: str, key: str | None) -> None:
        await self._ask(Store.cancel, response_id, key)

    async def _ask(
        self, method: Callable[..., Awaitable[T]], *arguments: Any, wait_s: float = 0.0
    ) -> T | None:
        """The method's result; None if there is no store that answers."""
        actor = await self._find_actor()
        if actor is not None:
            with suppress(ConnectionError):
                return await self._call(actor, method, *arguments, wait_s=wait_s)
        return None

    async def _call(
        self, actor: Any, method: Callable[..., Awaitable[T]], *arguments: Any, wait_s: float = 0.0
    ) -> T:
        """Raises CorralError, and ConnectionError if the actor is lost or late."""
        try:
            async with asyncio.timeout(wait_s + _ANSWER_S):
                answer: T | CorralError = await actor.call.remote(method.__name__, *arguments)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            if self._actor is actor:
                self._actor = None
            raise ConnectionError(f"The store of responses: {error!r}") from None
        if isinstance(answer, CorralError):
            raise answer
        return answer

    async def _find_actor(self) -> Any:
        """The actor; None if there is none."""
        async with self._finding:
            if self._actor is None:
                with suppress(ValueError):
                    self._actor = await asyncio.to_thread(ray.get_actor, self._name, NAMESPACE)
        return self._actor

    async def _start_actor(self) -> Any:
        """The actor, started if it must be."""
        async with self._finding:
            if self._actor is None:
                self._actor = await asyncio.to_thread(_store_actor, self._name)
        return self._actor


def _store_actor(name: str) -> Any:
    """The actor of that name, started if it is not there. Asks Ray's head. Raises RayError."""
    made: Any = ray.remote(StoreActor)
    return made.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=_AT_ONCE,
    ).remote()
