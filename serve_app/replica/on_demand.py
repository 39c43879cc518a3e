"""A model on demand as a Serve deployment. Its processes stay when the model is unloaded.

To start a process, and to import what an engine needs, takes seconds; to load a model into a process that
has done so takes little more than to read it.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any
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
from serve_app.engine.kv_cache.transfers.hot_prefixes import Prefix
from serve_app.errors import CorralError
from serve_app.replica.deployment import LoadedModel, prepare_process
from serve_app.replica.kv_transfer import Offer, TransferTarget
from serve_app.replica.lifecycle import ModelLifecycle, Residency
from serve_app.routing.autoscaling import PRESSURE
from serve_app.types import (
    Asleep,
    GenerationRequest,
    ReplicaRecords,
    ReplicaStats,
    Size,
    SlotAction,
)


@serve.deployment
class OnDemandReplica:
    """A model that is loaded and unloaded within one process. Calls that need the model load it; all others
    answer without it while it is not loaded. Used in the replica's event loop."""

    async def __init__(self, model: ResolvedModel) -> None:  # type: ignore[misc]  # Serve awaits it
        prepare_process()
        settings = model.on_demand
        assert settings is not None  # or it would be an EngineReplica
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        residency = Residency(_folder(context.app_name), self._id, settings.max_loaded)
        self._lifecycle = ModelLifecycle[LoadedModel](
            model.id, settings.keep_alive_s, residency, lambda: _load(model), _clean_up
        )

    async def _call(self, method: str, *arguments: Any) -> Any:
        """The answer of the model, which is loaded for it; a CorralError if it cannot be loaded."""
        try:
            async with self._lifecycle.present() as model:
                return await getattr(model, method)(*arguments)
        except CorralError as error:
            return error

    async def _call_if_loaded(self, method: str, *arguments: Any, default: Any = None) -> Any:
        """The answer of the model if it is loaded."""
        model = self._lifecycle.loaded
        return default if model is None else await getattr(model, method)(*arguments)

    async def generate(
        self, request: GenerationRequest, vocabulary_key: bytes, address: Address, number: int
    ) -> CorralError | None:
        """Load the model, and run a request: see LoadedModel.generate."""
        refusal: CorralError | None = await self._call(
            "generate", request, vocabulary_key, address, number
        )
        return refusal

    async def embed(
        self,
        texts: tuple[tuple[int, ...], ...],
        client: str,
        vocabulary_key: bytes,
        background: bool = False,
    ) -> NDArray[np.float32] | CorralError:
        """Load the model, and embed: see LoadedModel.embed."""
        vectors: NDArray[np.float32] | CorralError = await self._call(
            "embed", texts, client, vocabulary_key, background
        )
        return vectors

    async def media_tokens(self, sizes: Sequence[Size]) -> int | CorralError:
        """Load the model, and count: see LoadedModel.media_tokens."""
        n_tokens: int | CorralError = await self._call("media_tokens", sizes)
        return n_tokens

    async def load_adapter(self, config: AdapterConfig) -> str | CorralError:
        """Load the model, and an adapter: see LoadedModel.load_adapter."""
        version: str | CorralError = await self._call("load_adapter", config)
        return version

    async def is_there(self) -> CorralError | None:
        """Load the model, and have the ingresses know that. Errors are returned."""
        try:
            async with self._lifecycle.present():
                await self._lifecycle.told()
        except CorralError as error:
            return error
        return None

    async def release(self) -> None:
        """Unload the model as soon as nobody uses it, unless somebody asks for it before."""
        self._lifecycle.release()

    async def attach(self, address: Address) -> None:
        """Tell that ingress from now on what the model holds, whenever it is loaded."""
        await self._lifecycle.attach(address)

    async def unload_adapter(self, adapter_id: str, version: str) -> bool:
        """Unload an adapter. A model that is loaded later does not have it."""
        unloaded: bool = await self._call_if_loaded(
            "unload_adapter", adapter_id, version, default=True
        )
        return unloaded

    async def stats(self) -> ReplicaStats | Asleep:
        """The present work of the model."""
        found: ReplicaStats | Asleep = await self._call_if_loaded("stats", default=Asleep(self._id))
        return found

    async def explain(self, request_id: str) -> ReplicaRecords:
        """The records of a request."""
        records: ReplicaRecords = await self._call_if_loaded(
            "explain", request_id, default=ReplicaRecords(self._id, ())
        )
        return records

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction | CorralError | None:
        """Save, restore or erase a slot; None if another replica is meant, or the model is not loaded."""
        outcome: SlotAction | CorralError | None = await self._call_if_loaded(
            "act_on_slot", replica_id, action, slot_id, name
        )
        return outcome

    async def offer_prefixes(self, asker: str) -> Offer | None:
        """The model's part in KV transfers, as of LoadedModel; so are the next three."""
        offer: Offer | None = await self._call_if_loaded("offer_prefixes", asker)
        return offer

    async def send_prefix(self, source: str, prefix: Prefix) -> list[Any] | None:
        """Send a prefix, if the model is loaded."""
        sent: list[Any] | None = await self._call_if_loaded("send_prefix", source, prefix)
        return sent

    async def lack_prefixes(self, asker: str, prefixes: list[Prefix]) -> TransferTarget | None:
        """Say which prefixes the model lacks, if it is loaded."""
        target: TransferTarget | None = await self._call_if_loaded("lack_prefixes", asker, prefixes)
        return target

    async def take_prefix(self, target: str, sent: list[Any]) -> int | None:
        """Take a prefix, if the model is loaded."""
        n_tokens: int | None = await self._call_if_loaded("take_prefix", target, sent)
        return n_tokens

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: a model that is not loaded has no work."""
        load: dict[str, float] = await self._call_if_loaded(
            "record_autoscaling_stats", default={PRESSURE: 0.0}
        )
        return load

    def check_health(self) -> None:
        """Serve's hook: see LoadedModel.check_health."""
        model = self._lifecycle.loaded
        if model is not None:
            model.check_health()

    async def __del__(self) -> None:
        """Serve's destructor hook; before it, Serve has let running requests finish."""
        await self._lifecycle.close()


def _folder(app: str) -> Path:
    """Where an application's processes on this node keep the places of models: it goes with Ray's session.
    Not public, as of Ray 2.60."""
    session: Any = worker._global_node
    node_id = ray.get_runtime_context().get_node_id()
    return Path(session.get_session_dir_path()) / "corral" / node_id / quote(app, safe="")


async def _load(model: ResolvedModel) -> LoadedModel:
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
