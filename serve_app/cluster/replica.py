"""An engine replica as a Serve deployment."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ray
from ray import serve
from ray._private import worker

from serve_app.base import heap
from serve_app.cluster.process import begin_replica
from serve_app.cluster.serve_handle import handle_for_now
from serve_app.config.resolved import ResolvedModel
from serve_app.run.preflight import require_cache
from serve_app.run.replica.loaded_model import LoadedModel, load_parts
from serve_app.run.replica.on_demand import OnDemandModel
from serve_app.run.replica.place import Gang, ReplicaPlace
from serve_app.store.shared_entries import whole_application


@cache
def process_place(*, keeps_texts: bool) -> ReplicaPlace:
    """The place of this process's replica. `keeps_texts` says whether its log may have clients' texts.
    Raises ConfigError where this node has no folder to write to."""
    require_cache()
    begin_replica(keeps_texts=keeps_texts)
    heap.give_back()
    context = serve.get_replica_context()
    ray_context: Any = ray.get_runtime_context()
    node_id = ray_context.get_node_id()
    session: Any = worker._global_node  # not public, as of Ray 2.60
    resources: dict[str, float] = ray_context.get_assigned_resources()
    of_gang = (n for name, n in resources.items() if name.startswith("CPU_group_"))
    gang = None
    if (members := context.gang_context) is not None:
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        gang = Gang(members.gang_id, members.rank, members.world_size, host)
    app = whole_application(context.app_name)
    return ReplicaPlace(
        app,
        context.deployment,
        context.replica_id.unique_id,
        node_id,
        folder=Path(session.get_session_dir_path()) / "corral" / node_id / quote(app, safe=""),
        reserved_cpus=float(resources.get("CPU", next(of_gang, 0.0))),
        peers=partial(handle_for_now, context.deployment, context.app_name),
        gang=gang,
        put=ray.put,
    )


@serve.deployment
class EngineReplica(LoadedModel):
    """A model that is loaded as long as its process lives."""

    async def __init__(self, model: ResolvedModel) -> None:  # type: ignore[misc]  # Serve awaits it
        place = process_place(keeps_texts=model.data_at_rest)
        super().__init__(await load_parts(model, place))

    async def __del__(self) -> None:
        """Serve's destructor hook; before it, Serve has let running requests finish. Serve also calls it
        if the start has failed: there is nothing to give back then."""
        if vars(self):
            await self.leave()


@serve.deployment
class OnDemandReplica(OnDemandModel):
    """A model that is loaded and unloaded within its process."""

    async def __init__(self, model: ResolvedModel) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(model, process_place(keeps_texts=model.data_at_rest))

    async def __del__(self) -> None:
        """Serve's destructor hook; before it, Serve has let running requests finish. Serve also calls it
        if the start has failed: there is nothing to give back then."""
        if vars(self):
            await self.leave()
