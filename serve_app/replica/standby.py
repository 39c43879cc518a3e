"""A model on demand as a Serve deployment: its process stays when the model is unloaded.

To start a process, and to import what an engine needs, takes seconds; to load a model into a process that
has done so takes little more than to read it.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import ray
from numpy.typing import NDArray
from ray import serve
from ray._private import worker

from serve_app import heap, locks
from serve_app.channel.address import Address
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import AdapterConfig
from serve_app.errors import CorralError
from serve_app.placement.residency import Residency
from serve_app.replica.deployment import LoadedModel, prepare_process
from serve_app.replica.lifecycle import ModelLifecycle
from serve_app.types import (
    Asleep,
    GenerationRequest,
    ReplicaRecords,
    ReplicaStats,
    Size,
    SlotAction,
)

T = TypeVar("T")


@serve.deployment
class StandbyReplica:
    """A LoadedModel that comes and goes within one process, which answers for it. Used in the replica's
    event loop."""

    async def __init__(self, model: ResolvedModel) -> None:  # type: ignore[misc]  # Serve awaits it
        prepare_process()
        standby = model.standby
        assert standby is not None  # or it would be an EngineReplica
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        residency = Residency(_folder(context.app_name), model.id, standby.max_loaded)
        self._lifecycle = ModelLifecycle[LoadedModel](
            model.id, standby.keep_alive_s, residency, lambda: _loaded(model), _clean_up
        )

    async def generate(
        self, request: GenerationRequest, vocabulary_key: bytes, address: Address, number: int
    ) -> CorralError | None:
        """See LoadedModel.generate."""
        return await self._asked(lambda one: one.generate(request, vocabulary_key, address, number))

    async def embed(
        self,
        texts: tuple[tuple[int, ...], ...],
        client: str,
        vocabulary_key: bytes,
        background: bool = False,
    ) -> NDArray[np.float32] | CorralError:
        """See LoadedModel.embed."""
        return await self._asked(lambda one: one.embed(texts, client, vocabulary_key, background))

    async def media_tokens(self, sizes: Sequence[Size]) -> int | CorralError:
        """See LoadedModel.media_tokens."""
        return await self._asked(lambda one: one.media_tokens(sizes))

    async def load_adapter(self, config: AdapterConfig) -> str | CorralError:
        """See LoadedModel.load_adapter."""
        return await self._asked(lambda one: one.load_adapter(config))

    async def is_there(self) -> CorralError | None:
        """Load the model, and have the ingresses know that. Errors are returned."""
        return await self._asked(lambda _: self._lifecycle.told())

    async def _asked(self, call: Callable[[LoadedModel], Awaitable[T]]) -> T | CorralError:
        """The loaded model's answer, or why it cannot be loaded: see LoadedModel.generate."""
        try:
            async with self._lifecycle.present() as engine:
                return await call(engine)
        except CorralError as error:
            return error

    async def release(self) -> None:
        """Unload the model as soon as nobody uses it, unless somebody asks for it before."""
        self._lifecycle.release()

    async def attach(self, address: Address) -> None:
        """See LoadedModel.attach; while it is not loaded, it has nothing to tell."""
        await self._lifecycle.attach(address)

    async def unload_adapter(self, adapter_id: str, version: str) -> bool:
        """See LoadedModel.unload_adapter. A model that is loaded later does not have it."""
        engine = self._lifecycle.loaded
        return engine is None or await engine.unload_adapter(adapter_id, version)

    async def stats(self) -> ReplicaStats | Asleep:
        """See LoadedModel.stats."""
        engine = self._lifecycle.loaded
        found: ReplicaStats | Asleep = Asleep(self._id) if engine is None else await engine.stats()
        return found

    async def explain(self, wanted: str) -> ReplicaRecords:
        """See LoadedModel.explain."""
        engine = self._lifecycle.loaded
        return ReplicaRecords(self._id, ()) if engine is None else await engine.explain(wanted)

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction | CorralError | None:
        """See LoadedModel.act_on_slot; None if it is not loaded, too."""
        engine = self._lifecycle.loaded
        if engine is None:
            return None
        return await engine.act_on_slot(replica_id, action, slot_id, name)

    def check_health(self) -> None:
        """See LoadedModel.check_health."""
        engine = self._lifecycle.loaded
        if engine is not None:
            engine.check_health()

    async def __del__(self) -> None:
        """Serve's destructor hook; before it, Serve has let running requests finish."""
        await self._lifecycle.close()


def _folder(app: str) -> Path:
    """Where an application's processes on this node keep the places of models: it goes with Ray's session.
    Not public, as of Ray 2.60."""
    session: Any = worker._global_node
    node_id = ray.get_runtime_context().get_node_id()
    return Path(session.get_session_dir_path()) / "corral" / node_id / quote(app, safe="")


async def _loaded(model: ResolvedModel) -> LoadedModel:
    """Raises ConfigError, and whatever else may go wrong."""
    loaded = LoadedModel.__new__(LoadedModel)
    try:
        await loaded.__init__(model)  # type: ignore[misc]  # as Serve does
    except BaseException:
        await loaded.close()
        loaded.forget()
        raise
    return loaded


def _clean_up() -> None:
    """The loaded parts hang in cycles of Python's, their pages in the heap, and their files are locked."""
    gc.collect()
    heap.trim_soon()
    locks.leave_all()
