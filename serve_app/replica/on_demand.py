"""A model on demand as a Serve deployment. Its processes stay when the model is unloaded.

To start a process, and to import what an engine needs, takes seconds; to load a model into a process that
has done so takes little more than to read it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ray
from ray import serve
from ray._private import worker

from serve_app import heap, locks
from serve_app.channel.protocol import Address
from serve_app.config.resolved import ResolvedModel
from serve_app.errors import CorralError
from serve_app.replica.deployment import LoadedModel, prepare_process
from serve_app.replica.lifecycle import ModelLifecycle, Residency
from serve_app.routing.autoscaling import PRESSURE
from serve_app.types import Asleep, ReplicaRecords


def _loading(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a loaded model as one of OnDemandReplica, which loads the model for it. A CorralError
    is returned if the model cannot be loaded."""

    @functools.wraps(method)
    async def call(self: Any, *arguments: Any) -> Any:
        try:
            async with self.lifecycle.present() as model:
                return await getattr(model, method.__name__)(*arguments)
        except CorralError as error:
            return error

    return call


def _if_loaded(
    method: Callable[..., Any], default: Callable[..., Any] = lambda *_: None
) -> Callable[..., Any]:
    """The method of a loaded model as one of OnDemandReplica, which does not load the model for it.
    `default` answers for a model that is not loaded: it gets the replica's id and the arguments."""

    @functools.wraps(method)
    async def call(self: Any, *arguments: Any) -> Any:
        model = self.lifecycle.loaded
        if model is None:
            return default(self.id, *arguments)
        return await getattr(model, method.__name__)(*arguments)

    return call


@serve.deployment
class OnDemandReplica:
    """A model that is loaded and unloaded within one process. Calls that need the model load it; all others
    answer without it while it is not loaded. Used in the replica's event loop."""

    async def __init__(self, model: ResolvedModel) -> None:  # type: ignore[misc]  # Serve awaits it
        prepare_process(keeps_texts=model.data_at_rest)
        settings = model.on_demand
        assert settings is not None  # or it would be an EngineReplica
        context = serve.get_replica_context()
        self.id = context.replica_id.unique_id
        residency = Residency(_folder(context.app_name), self.id, settings.max_loaded)
        self.lifecycle = ModelLifecycle[LoadedModel](
            model.id, settings.keep_alive_s, residency, lambda: _load(model), _clean_up
        )

    generate = _loading(LoadedModel.generate)
    embed = _loading(LoadedModel.embed)
    media_tokens = _loading(LoadedModel.media_tokens)
    load_adapter = _loading(LoadedModel.load_adapter)
    unload_adapter = _if_loaded(LoadedModel.unload_adapter, lambda _, *_arguments: True)
    stats = _if_loaded(LoadedModel.stats, lambda replica_id: Asleep(replica_id))
    explain = _if_loaded(LoadedModel.explain, lambda replica_id, _: ReplicaRecords(replica_id, ()))
    act_on_slot = _if_loaded(LoadedModel.act_on_slot)
    offer_prefixes = _if_loaded(LoadedModel.offer_prefixes)
    send_prefix = _if_loaded(LoadedModel.send_prefix)
    lack_prefixes = _if_loaded(LoadedModel.lack_prefixes)
    take_prefix = _if_loaded(LoadedModel.take_prefix)
    record_autoscaling_stats = _if_loaded(
        LoadedModel.record_autoscaling_stats, lambda _: {PRESSURE: 0.0}
    )

    async def is_there(self) -> CorralError | None:
        """Load the model, and have the ingresses know that. Errors are returned."""
        try:
            async with self.lifecycle.present():
                await self.lifecycle.told()
        except CorralError as error:
            return error
        return None

    async def release(self) -> None:
        """Unload the model as soon as nobody uses it, unless somebody asks for it before."""
        self.lifecycle.release()

    async def attach(self, address: Address) -> None:
        """Tell that ingress from now on what the model holds, whenever it is loaded."""
        await self.lifecycle.attach(address)

    def check_health(self) -> None:
        """Serve's hook: see LoadedModel.check_health."""
        model = self.lifecycle.loaded
        if model is not None:
            model.check_health()

    async def __del__(self) -> None:
        """Serve's destructor hook; before it, Serve has let running requests finish."""
        await self.lifecycle.close()


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
