"""Entries that all ingresses and replicas of an application know: adapters, weights, downloads.

They are kept with Ray's head, and last as long as it does. Functions and methods ask Ray's head, block
meanwhile, and raise its errors, unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from ray.experimental import internal_kv
from ray.serve.context import ReplicaContext

from serve_app.config.sources import AdapterConfig
from serve_app.errors import InvalidRequestError
from serve_app.progress import Report, Stage
from serve_app.types import AdapterUse, FetchingReplica

_NAMESPACE = b"corral"
_TELL_EVERY_S = 1.0
_STALE_S = 10.0
"""What was not told anew for so long is of a replica that is gone. Clocks of nodes may differ by less."""
MOST_ADAPTERS = 64
MOST_CHANGES = 32

Entry = Mapping[str, Any]
Weights = Mapping[str, float]


class NumberedEntries:
    """The entries of one kind in an application. Each model's are numbered from 0 on."""

    def __init__(self, kind: str, app: str) -> None:
        self._prefix = f"{kind}/{app}/"

    def numbers(self, model: str) -> list[int]:
        """The numbers of the entries, the lowest first."""
        listed = internal_kv._internal_kv_list(self._of(model), namespace=_NAMESPACE)
        return sorted(int(key.rpartition(b"/")[2]) for key in listed)

    def read(self, model: str, last: int = 0) -> list[tuple[int, Entry]]:
        """The last entries, or all, with their numbers, the lowest first, without the empty ones."""
        entries = []
        for number in self.numbers(model)[-last:]:
            key = self._key(model, number)
            value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if value is not None and (entry := json.loads(value)):
                entries.append((number, entry))
        return entries

    def add(self, model: str, entry: Entry) -> int:
        """Add an entry. Returns its number: of two that are added at once, each has its own."""
        numbers = self.numbers(model)
        number = numbers[-1] + 1 if numbers else 0
        while self._put(model, number, entry, overwrite=False):
            number += 1  # somebody else was faster
        return number

    def replace(self, model: str, number: int, entry: Entry) -> None:
        self._put(model, number, entry, overwrite=True)

    def empty(self, model: str, number: int) -> None:
        """Have an entry no more. Its number is not used again."""
        self.replace(model, number, {})

    def remove(self, model: str, number: int) -> None:
        """Have an entry no more. Its number may be used again if it was the highest."""
        internal_kv._internal_kv_del(self._key(model, number), namespace=_NAMESPACE)

    def _put(self, model: str, number: int, entry: Entry, *, overwrite: bool) -> bool:
        """Write an entry. Returns whether there was one."""
        key, value = self._key(model, number), json.dumps(entry).encode()
        existed: bool = internal_kv._internal_kv_put(key, value, overwrite, namespace=_NAMESPACE)
        return existed

    def _key(self, model: str, number: int) -> bytes:
        return self._of(model) + str(number).encode()

    def _of(self, model: str) -> bytes:
        return f"{self._prefix}{model.replace('/', '%')}/".encode()


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A LoRA adapter that was loaded while serving."""

    number: int
    """Position among the adapters that the model ever had, from 0 on."""
    config: AdapterConfig
    version: str

    @property
    def use(self) -> AdapterUse:
        return AdapterUse(self.config.id, self.config.scale, self.version)


class LoadedAdapters:
    """The adapters of all replicas of an application. A replica that comes later finds them."""

    def __init__(self, app: str) -> None:
        self._entries = NumberedEntries("adapters", app)

    def read(self, model_id: str) -> tuple[LoadedAdapter, ...]:
        """A model's adapters, by their numbers."""
        return tuple(
            LoadedAdapter(number, AdapterConfig.model_validate(entry["config"]), entry["version"])
            for number, entry in self._entries.read(model_id)
        )

    def add(self, model_id: str, config: AdapterConfig, version: str) -> LoadedAdapter:
        """Have one more adapter, for all. Raises InvalidRequestError for a taken name, or too many."""
        self._check_room(model_id, config.id)
        content = {"config": config.model_dump(mode="json", exclude_unset=True), "version": version}
        number = self._entries.add(model_id, content)
        first = next(loaded for loaded in self.read(model_id) if loaded.config.id == config.id)
        if first.number != number:
            self._entries.empty(model_id, number)
            raise _taken(config.id)
        return first

    def remove(self, model_id: str, adapter_id: str) -> LoadedAdapter | None:
        """Have an adapter no more; None if there is none of that name."""
        for loaded in self.read(model_id):
            if loaded.config.id == adapter_id:
                self._entries.empty(model_id, loaded.number)
                return loaded
        return None

    def _check_room(self, model_id: str, adapter_id: str) -> None:
        adapters = self.read(model_id)
        if any(loaded.config.id == adapter_id for loaded in adapters):
            raise _taken(adapter_id)
        if len(adapters) >= MOST_ADAPTERS:
            raise InvalidRequestError(f"There are {MOST_ADAPTERS} loaded adapters already.", "load")


def _taken(adapter_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"There already is an adapter {adapter_id!r}. Unload it first.", "load"
    )


@dataclass(frozen=True, slots=True)
class WeightChange:
    """A change of a model's weights."""

    weights: Weights
    configured: Weights
    """The configuration's weights when the change was made."""


class VersionWeights:
    """The weights of versions as they were changed while serving, the same for all ingresses.

    The newest change counts, unless the configuration's weights are others than the ones that it changed.
    """

    def __init__(self, app: str) -> None:
        self._entries = NumberedEntries("versions", app)

    def history(self, model: str) -> list[WeightChange]:
        """All changes that are remembered, the newest first."""
        return [WeightChange(**entry) for _, entry in reversed(self._entries.read(model))]

    def newest(self, model: str) -> WeightChange | None:
        changes = [WeightChange(**entry) for _, entry in self._entries.read(model, last=1)]
        return changes[0] if changes else None

    def add(self, model: str, weights: Weights, configured: Weights) -> None:
        """Add a change. Of two that are made at once, the later one counts."""
        self._entries.add(model, {"weights": dict(weights), "configured": dict(configured)})
        for number in self._entries.numbers(model)[:-MOST_CHANGES]:
            self._entries.remove(model, number)


@asynccontextmanager
async def progress_told(context: ReplicaContext, node_id: str) -> AsyncIterator[Report]:
    """Let everybody know, every second until the end of the block, how far this replica is with its model:
    no replica answers before it has one. Raises nothing of Ray's."""
    replica_id = context.replica_id.unique_id
    key = _fetching(context.app_name, context.deployment) + replica_id.encode()
    latest: list[Stage] = []
    enough = asyncio.Event()

    def take(stage: Stage) -> None:
        latest[:] = [stage]

    async def keep_telling() -> None:
        while not enough.is_set():
            for stage in latest:
                figures = stage.from_origin_bytes, stage.from_nodes_bytes, stage.limit_s
                replica = FetchingReplica(replica_id, node_id, stage.name, stage.done, *figures)
                value = json.dumps({"at": time.time(), "told": asdict(replica)}).encode()
                with suppress(Exception):  # Ray's head is away for a moment
                    await asyncio.to_thread(
                        internal_kv._internal_kv_put, key, value, True, namespace=_NAMESPACE
                    )
            with suppress(TimeoutError):
                async with asyncio.timeout(_TELL_EVERY_S):
                    await enough.wait()

    telling = asyncio.create_task(keep_telling())
    try:
        yield take
    finally:
        enough.set()
        await telling
        with suppress(Exception):
            await asyncio.to_thread(internal_kv._internal_kv_del, key, namespace=_NAMESPACE)


def fetching_replicas(app: str, deployment: str) -> tuple[FetchingReplica, ...]:
    """The replicas of a deployment that fetch their model now."""
    replicas = []
    for key in internal_kv._internal_kv_list(_fetching(app, deployment), namespace=_NAMESPACE):
        value: bytes | None = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        if value is not None:
            entry = json.loads(value)
            if time.time() - entry["at"] < _STALE_S:
                replicas.append(FetchingReplica(**entry["told"]))
    return tuple(replicas)


def _fetching(app: str, deployment: str) -> bytes:
    return f"fetching/{app}/{deployment}/".encode()
