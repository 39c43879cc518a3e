"""The store of responses as a Ray actor, which all ingresses of an application share.

It is started by the first response that is kept, outlives every ingress, and ends when it has kept nothing
for a while: who never keeps a response has no such process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from serve_app.errors import CorralError
from serve_app.ingress.responses.store import AppendResult, Bounds, LogAppend, Store, StoredResponse

logger = logging.getLogger("corral.ingress")

LOOK_S, LAST_S = 10.0, 60.0
"""The seconds between two looks whether there is anything. The actor ends when it has kept nothing for the
longer time."""
_ANSWER_S = 10.0
_RETRY_S = (0.2, 1.0, 3.0)
"""An actor that has just ended is still found by its name for a moment."""
_NAMESPACE = "corral"


class StoreActor:
    """A Store in a process of its own."""

    def __init__(self, bounds: Bounds) -> None:
        self._store = Store(bounds)
        self._watching: asyncio.Task[None] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of the store's method, or the CorralError that it raises."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        try:
            return await getattr(self._store, method)(*arguments)
        except CorralError as error:
            return error

    async def be(self, bounds: Bounds) -> None:
        self._store.bounds = bounds

    async def _watch(self) -> None:
        """End when the store has had nothing for long."""
        empty_s = 0.0
        while empty_s < LAST_S:
            await asyncio.sleep(LOOK_S)
            empty_s = 0.0 if len(self._store) else empty_s + LOOK_S
        ray.get_runtime_context().current_actor.leave.remote()

    async def leave(self) -> None:
        """End this process, unless somebody came meanwhile."""
        if len(self._store):
            self._watching = asyncio.create_task(self._watch())
            return
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class RayStore:
    """A Store in an actor's process. Used in one ingress's event loop.

    Besides CorralErrors, it raises ConnectionError: the actor was lost, and with it all that it had.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._name = f"responses-{serve.get_replica_context().app_name}"
        self._actor: Any = None
        self._finding = asyncio.Lock()

    @property
    def keeps_any(self) -> bool:
        return self._bounds.kept_s > 0

    async def prepare(self) -> None:
        """Start the actor, unless it is there. Raises nothing: who keeps a response starts it, too."""
        try:
            if self.keeps_any:
                await self._made()
        except Exception:
            logger.exception("The store of responses cannot be started")

    async def put(self, *arguments: Any) -> None:
        """Keep a response, in a new actor if the last one is gone."""
        if not self.keeps_any:
            return
        for pause_s in _RETRY_S:
            with suppress(ConnectionError):
                await self._call(await self._made(), "put", *arguments)
                return
            await asyncio.sleep(pause_s)
        await self._call(await self._made(), "put", *arguments)

    async def append(self, appends: Sequence[LogAppend]) -> list[AppendResult]:
        actor = await self._found()
        if actor is None:
            raise ConnectionError("There is no store of responses.")
        results: list[AppendResult] = await self._call(actor, "append", appends)
        return results

    async def find(
        self, response_id: str, key: str | None, first: int = 0, wait_s: float = 0.0
    ) -> StoredResponse | None:
        arguments = response_id, key, first, wait_s
        stored: StoredResponse | None = await self._ask("find", *arguments, wait_s=wait_s)
        return stored

    async def delete(self, response_id: str, key: str | None) -> bool:
        return bool(await self._ask("delete", response_id, key))

    async def cancel(self, response_id: str, key: str | None) -> None:
        await self._ask("cancel", response_id, key)

    async def adopt(self) -> StoredResponse | None:
        stored: StoredResponse | None = await self._ask("adopt")
        return stored

    async def _ask(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """The method's result; None if there is no store."""
        actor = await self._found()
        return None if actor is None else await self._call(actor, method, *arguments, wait_s=wait_s)

    async def _call(self, actor: Any, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        """Raises CorralError, and ConnectionError if the actor is lost or late."""
        try:
            async with asyncio.timeout(wait_s + _ANSWER_S):
                answer = await actor.call.remote(method, *arguments)
        except (RayActorError, RayTaskError, TimeoutError) as error:
            if self._actor is actor:
                self._actor = None
            raise ConnectionError(f"The store of responses: {error!r}") from None
        if isinstance(answer, CorralError):
            raise answer
        return answer

    async def _found(self) -> Any:
        """The actor; None if there is none."""
        async with self._finding:
            if self._actor is None:
                with suppress(ValueError):
                    self._actor = await asyncio.to_thread(ray.get_actor, self._name, _NAMESPACE)
        return self._actor

    async def _made(self) -> Any:
        """The actor, started if it must be; with this ingress's bounds."""
        async with self._finding:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._make)
                self._actor.be.remote(self._bounds)
        return self._actor

    def _make(self) -> Any:
        options: dict[str, Any] = {
            "name": self._name,
            "namespace": _NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_concurrency": 10_000,
        }
        made: Any = ray.remote(StoreActor)
        return made.options(**options).remote(self._bounds)
