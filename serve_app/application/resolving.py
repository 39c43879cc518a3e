"""Decides what the configuration of a model leaves open."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from serve_app.application import lookup, rollout
from serve_app.config import sizing
from serve_app.config.resolved import OnDemandSettings, ResolvedModel
from serve_app.config.schema import DeploymentConfig, EngineConfig, ModelConfig
from serve_app.config.sizing import ModelNeeds
from serve_app.config.sources import NO_DOWNLOADS, DownloadsConfig
from serve_app.errors import ConfigError
from serve_app.placement import machine, plan
from serve_app.placement.machine import Machine, oversubscription
from serve_app.placement.plan import Share


def resolve(
    models: Sequence[ModelConfig],
    here: Machine | None = None,
    downloads: DownloadsConfig = NO_DOWNLOADS,
    max_loaded: int = 1,
) -> list[ResolvedModel]:
    """Decide what the configuration leaves open, from what the model files begin with and from a machine,
    by default this one: all models must fit on it, but of those that are loaded on demand, so many at
    once. Raises ConfigError that names the model."""
    here = here or machine.read()
    n_on_demand = sum(model.keep_alive is not None for model in models)
    n_at_once = min(n_on_demand, max_loaded)
    n_places = len(models) - n_on_demand + n_at_once
    shares = plan.shares(here, n_places)
    always, when_asked_for = iter(shares[n_at_once:]), itertools.cycle(shares[:n_at_once])
    resolved = []
    versions, aliases = rollout.versions(models), rollout.shared_aliases(models)
    for model in models:
        share = next(always if model.keep_alive is None else when_asked_for)
        if names_its_share(model):
            share = plan.undivided(here, n_places)
        try:
            undecided = _resolve(model, share, here, n_places, downloads)
        except ConfigError as error:
            raise ConfigError(f"models ({rollout.engine_id(model)}): {error}") from None
        on_demand = undecided.on_demand
        if on_demand is not None:
            on_demand = on_demand.beside_others(max_loaded, n_at_once / n_on_demand)
        resolved.append(
            replace(
                undecided,
                on_demand=on_demand,
                version=versions.get(undecided.id),
                aliases=aliases[model.id],
            )
        )
    return resolved


def names_its_share(model: ModelConfig) -> bool:
    """Whether the configuration says what a replica has of a machine."""
    engine, reserved = model.engine, model.deployment.ray_actor_options.num_cpus
    sizes = (engine.threads, engine.threads_batch, engine.numa, reserved)
    return any(size is not None for size in sizes)


def _resolve(
    model: ModelConfig, share: Share, here: Machine, n_models: int, downloads: DownloadsConfig
) -> ResolvedModel:
    source, projector, needs = lookup.looked_up(model, downloads)
    memory_bytes = here.memory_bytes // n_models
    if needs is not None:
        share = _with_room(model, share, needs, here.total_bytes // n_models)
    num_cpus = _num_cpus(model, share, here)
    reserved = model.deployment.ray_actor_options.num_cpus
    reserved = num_cpus if reserved is None else reserved
    n_together = plan.n_together(here, reserved, _most_replicas(model.deployment, share))
    has_peers = model.deployment.autoscaling_config is not None or share.n_replicas > 1
    options = sizing.resolve(
        model.engine,
        needs,
        cores=_cores(model.engine, share, here, reserved),
        memory_bytes=memory_bytes,
        n_replicas=n_together,
    )
    return ResolvedModel(
        id=rollout.engine_id(model),
        aliases=tuple(model.aliases),
        tags=tuple(model.tags),
        defaults=lookup.model_defaults(model.defaults),
        source=source,
        downloads=downloads,
        options=options,
        system_prompts=tuple(model.engine.system_prompts),
        threads=model.engine.threads,
        allow_oversubscription=model.engine.allow_oversubscription,
        pin_cores=model.engine.pin_cores,
        n_replicas=share.n_replicas,
        sizing=f"{share.reason}; {_memory_report(memory_bytes, n_together)}",
        num_cpus=num_cpus,
        batch_wait_timeout_s=model.batch_wait_timeout_s,
        memory_shares=sizing.shares_of_memory(model.engine),
        adapters=tuple(lookup.pinned_adapter(one, downloads) for one in model.adapters),
        projector=projector,
        draft=lookup.pinned_source("engine.draft", lookup.draft_source(model), downloads),
        weight_bytes=0 if needs is None else needs.weight_bytes,
        on_demand=None
        if model.keep_alive is None
        else OnDemandSettings(model.keep_alive, reserved, n_together, has_peers=has_peers),
    )


def _with_room(model: ModelConfig, share: Share, needs: ModelNeeds, total_bytes: int) -> Share:
    """No more replicas than all memory has room for: those that are to be replaced may take some now."""
    if share.n_replicas == 1:
        return share
    n = sizing.fitting_replicas(model.engine, needs, share.n_replicas, total_bytes)
    return share if n == share.n_replicas else plan.merged(share, n)


def _most_replicas(configured: DeploymentConfig, share: Share) -> int:
    """As many as may run at once, on any machine."""
    scaling = configured.autoscaling_config
    if scaling is not None and "max_replicas" in scaling.model_fields_set:
        most = scaling.max_replicas
    else:
        most = configured.num_replicas or share.n_replicas
    return min(most, configured.max_replicas_per_node or most)


def _cores(engine: EngineConfig, share: Share, here: Machine, reserved: float) -> int:
    threads = max(engine.threads or 0, engine.threads_batch or 0)
    return min(threads or share.n_cores, plan.n_cores(here, reserved))


def _memory_report(memory_bytes: int, n_replicas: int) -> str:
    gib = f"sized for {memory_bytes / 2**30:.1f} GiB of memory"
    return gib if n_replicas == 1 else f"{gib} for {n_replicas} replicas"


def _num_cpus(model: ModelConfig, share: Share, here: Machine) -> float:
    """The CPUs that Ray reserves for a replica, unless the deployment says otherwise: a core for
    each thread. Raises ConfigError for threads that cannot have a CPU each; the replica looks
    again, on its node."""
    engine, reserved = model.engine, model.deployment.ray_actor_options.num_cpus
    threads, cpus = max(engine.threads or 0, engine.threads_batch or 0), here.n_cpus
    complaint = None
    if reserved is None:
        whose = (
            "all that this machine may use (if replicas run on others, set "
            "deployment.ray_actor_options.num_cpus)"
        )
        complaint = oversubscription(threads, cpus, whose)
    elif reserved > 0:
        whose = "which deployment.ray_actor_options.num_cpus reserves"
        complaint = oversubscription(threads, max(1, math.floor(reserved)), whose)
    if complaint and not engine.allow_oversubscription:
        raise ConfigError(complaint)
    cpus_of_threads = plan.cpus_for(here, threads)
    return max(share.num_cpus, cpus_of_threads) if engine.threads is None else cpus_of_threads
