"""Ray's values for all processes of a cluster, and its actors that end when nobody needs them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import ray
from ray.experimental import internal_kv

NAMESPACE = "corral"
_NAMESPACE = NAMESPACE.encode()
LOOK_S, IDLE_S = 10.0, 60.0
"""The seconds between two looks whether an actor is needed, and the seconds without need after which it
ends."""


class RayValues:
    """The KeyValues of processes of Ray. Methods raise Ray's errors."""

    def list(self, prefix: str) -> Iterable[str]:
        keys = internal_kv._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)
        return [key.decode() for key in keys]

    def get(self, key: str) -> bytes | None:
        value: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=_NAMESPACE)
        return value

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        return bool(
            internal_kv._internal_kv_put(key.encode(), value, overwrite, namespace=_NAMESPACE)
        )

    def delete(self, key: str) -> None:
        internal_kv._internal_kv_del(key.encode(), namespace=_NAMESPACE)


class IdleActor(ABC):
    """A process that outlives whoever starts it, and ends when it has not been needed for long. Its methods
    run in the actor's event loop."""

    _watching: asyncio.Task[None] | None = None

    @abstractmethod
    def is_needed(self) -> bool:
        """Whether it was needed since the last look, LOOK_S ago."""

    def watch(self) -> None:
        """Have the process end when it is not needed any more. Idempotent."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        idle_s = 0.0
        while idle_s < IDLE_S:
            await asyncio.sleep(LOOK_S)
            idle_s = 0.0 if self.is_needed() else idle_s + LOOK_S
        ray.get_runtime_context().current_actor.leave.remote()

    async def leave(self) -> None:
        """End this process, unless somebody came meanwhile."""
        if self.is_needed():
            self._watching = asyncio.create_task(self._watch())
            return
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def actor_named(
    name: str, kind: type[IdleActor], *arguments: Any, n_at_once: int, **options: Any
) -> Any:
    """The actor of that name, which is started with these arguments and Ray's options if it is not there.
    Asks Ray's head. Raises RayError or ValueError."""
    made: Any = ray.remote(kind)
    return made.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=n_at_once,
        **options,
    ).remote(*arguments)
