"""`serve run` calls `build(args)`: configuration in, Serve application out."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from serve_app import on_demand, rollout
from serve_app.config import schema, sizing
from serve_app.config.defaults import ModelDefaults
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import (
    BatchConfig,
    DefaultsConfig,
    DeploymentConfig,
    EngineConfig,
    IngressConfig,
    ModelConfig,
)
from serve_app.config.sizing import ModelNeeds
from serve_app.config.sources import (
    NO_DOWNLOADS,
    AdapterConfig,
    DownloadsConfig,
    ModelSource,
    ProjectorSource,
)
from serve_app.engine.backends.draft_model import N_CTX, check_draft
from serve_app.engine.backends.own_layers import check_own_layers, slot_bytes
from serve_app.errors import ConfigError
from serve_app.ingress.batch.books import Limits
from serve_app.ingress.batch.service import BatchOptions
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.generation.sampling_fields import given
from serve_app.ingress.http.addresses import is_loopback
from serve_app.ingress.http.auth import Access
from serve_app.ingress.http.limits.bodies import BodyLimits
from serve_app.ingress.responses.store import Bounds
from serve_app.llama.model import Model
from serve_app.llama.vision.usable import why_unusable
from serve_app.openvino.exported.files import ONLY_OPENVINO
from serve_app.placement import machine, plan
from serve_app.placement.machine import Machine, oversubscription
from serve_app.placement.plan import Share
from serve_app.replica.deployment import EngineReplica
from serve_app.replica.standby import StandbyReplica
from serve_app.sampling import Api
from serve_app.store import models as store
from serve_app.store.pieces import ALONE
from serve_app.store.remote import UnreachableError
from serve_app.store.sharing.cluster import ClusterSharing

logger = logging.getLogger("corral.config")

# Room in a full replica for statistics, health checks and refusals, which its own bound does not count.
_CONTROL_REQUESTS = 16
# Serve refuses by totals, and the engine whoever takes most: so replicas accept more than there are places.
_BEYOND_PLACES = 2
# Those in the background have places of their own, for each slot.
_BACKGROUND_REQUESTS = 4
_POLICY = {"policy_function": "serve_app.routing.autoscaling:by_pressure"}
# Serve's router looks for a free replica again after 25 ms, growing to 500 ms, by default: too long
# for a slot to stand idle.
_ROUTER = {
    "request_router_class": "serve_app.routing.request_router:PrefixRouter",
    "initial_backoff_s": 0.005,
    "backoff_multiplier": 1.5,
    "max_backoff_s": 0.05,
}


def build(args: dict[str, Any]) -> Application:
    """The application for `applications[0].args`.

    Raises RayServeException with one message that names the fields that are wrong: the only kind of error
    that Serve shows as it is, and does not try again.
    """
    try:
        app = schema.parse(args)
        _refuse_strangers(app.ingress)
        scales = app.ingress.batch.may_scale
        resolved = resolve(app.models, downloads=app.downloads, max_loaded=app.max_loaded_models)
        models = [
            replace(model, batches_may_scale=scales, max_load_s=app.max_load_s)
            for model in on_demand.with_standby(app, resolved)
        ]
        rollout.check_memory(
            [one for one, given in zip(models, app.models, strict=True) if not _is_sized(given)],
            machine.read().total_bytes,
        )
    except ConfigError as error:
        raise RayServeException(str(error)) from None
    engines = [
        rollout.keep(
            _replica(model)
            .options(**engine_options(configured, model, app.max_loaded_models))
            .bind(model),
            model,
        )
        for configured, model in zip(app.models, models, strict=True)
    ]
    comes_and_goes = any(on_demand.comes_and_goes(model) for model in models)
    options = ingress_options(app.ingress, beside_on_demand=comes_and_goes)
    ingress = Ingress.options(**options)  # type: ignore[attr-defined]
    settings = access(app.ingress), app.ingress.sse_ping_interval_s, kept_responses(app.ingress)
    kept = batches(app.ingress.batch)
    return ingress.bind(models, engines, *settings, kept)  # type: ignore[no-any-return]


def _replica(model: ResolvedModel) -> Any:
    return EngineReplica if model.standby is None else StandbyReplica


def access(ingress: IngressConfig) -> Access:
    """The access rules, by the configuration and by the proxy before the ingress."""
    hidden = ingress.ui == "auto" and _proxy_hides_strangers()  # loopback means nothing then
    return Access(
        ingress.api_key_file,
        ingress.allow_anonymous,
        False if hidden else ingress.ui,
        tuple(ingress.cors_origins),
        tuple(ingress.allowed_hosts),
        ingress.anonymous_admin,
        ingress.strict,
        BodyLimits(ingress.open_bodies, ingress.max_open_bodies_mib << 20, ingress.min_body_rate),
        ingress.max_ongoing_requests,
        tuple(ingress.disabled_routes),
        ingress.verbose,
        tuple(ingress.picture_hosts),
    )


def kept_responses(ingress: IngressConfig) -> Bounds:
    """How many responses are kept."""
    return Bounds(
        ingress.responses_kept_s,
        ingress.max_responses_per_key,
        ingress.max_responses_mib_per_key << 20,
        ingress.max_responses_mib << 20,
    )


def batches(configured: BatchConfig) -> BatchOptions | None:
    """Where files and batches are kept, and how much; None if they are not."""
    if configured.folder is None:
        return None
    limits = Limits(
        configured.max_file_mib << 20,
        configured.max_files,
        configured.max_total_mib << 20,
        configured.max_lines,
        configured.max_batches,
    )
    return BatchOptions(configured.folder.expanduser(), limits, configured.max_concurrency)


def _refuse_strangers(ingress: IngressConfig) -> None:
    """Raises ConfigError where nobody could tell who comes from another machine, and it matters."""
    is_open = ingress.api_key_file is None and not ingress.allow_anonymous
    if is_open and _proxy_hides_strangers():
        raise ConfigError(
            "RAY_SERVE_ENABLE_HA_PROXY=1 hides which requests come from other machines. Set "
            "http_options.host: 127.0.0.1 (this machine only), ingress.api_key_file, or "
            "ingress.allow_anonymous: true"
        )


def _proxy_hides_strangers() -> bool:
    """Whether other machines' requests can look like this one's own: Serve's HAProxy asks the ingress over
    loopback, adds nothing to tell who asked, and listens where Serve's `http_options.host` says."""
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return False
    host = _http_host()
    return host is None or not is_loopback(host)


def _http_host() -> str | None:
    """Serve's `http_options.host`, which no client has a say in: HAProxy listens on what it says, and it
    stays while Serve runs. None if Serve does not run here."""
    serve = (
        _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    )
    return None if serve is None else serve.http_config.host


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
        if _is_sized(model):
            share = plan.undivided(here, n_places)
        try:
            found = _resolve(model, share, here, n_places, downloads)
        except ConfigError as error:
            raise ConfigError(f"models ({rollout.engine_id(model)}): {error}") from None
        resolved.append(replace(found, version=versions.get(found.id), aliases=aliases[model.id]))
    return resolved


def _is_sized(model: ModelConfig) -> bool:
    """Whether the configuration says what a replica has of a machine."""
    engine, reserved = model.engine, model.deployment.ray_actor_options.num_cpus
    sizes = (engine.threads, engine.threads_batch, engine.numa, reserved)
    return any(size is not None for size in sizes)


def _resolve(
    model: ModelConfig, share: Share, here: Machine, n_models: int, downloads: DownloadsConfig
) -> ResolvedModel:
    source, projector, needs = _looked_up(model, downloads)
    memory_bytes = here.memory_bytes // n_models
    if needs is not None:
        share = _with_room(model, share, needs, here.total_bytes // n_models)
    num_cpus = _num_cpus(model, share, here)
    reserved = model.deployment.ray_actor_options.num_cpus
    reserved = num_cpus if reserved is None else reserved
    n_together = plan.n_together(here, reserved, _most_replicas(model.deployment, share))
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
        defaults=_defaults(model.defaults),
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
        adapters=tuple(_pinned(one, downloads) for one in model.adapters),
        projector=projector,
        draft=_pinned_source("engine.draft", _draft_source(model), downloads),
        weight_bytes=0 if needs is None else needs.weight_bytes,
        is_on_demand=model.keep_alive is not None,
    )


def _pinned(adapter: AdapterConfig, downloads: DownloadsConfig) -> AdapterConfig:
    """With the same bytes on every node. Raises ConfigError."""
    source = _pinned_source(f"adapters ({adapter.id})", adapter.source, downloads)
    return adapter.model_copy(update={"source": source})


def _pinned_source(
    name: str, source: ModelSource | None, downloads: DownloadsConfig
) -> ModelSource | None:
    """The same bytes on every node, of a file that llama.cpp reads. Raises ConfigError that begins with the
    name."""
    if source is None:
        return None
    try:
        pinned = store.pinned(source, downloads)
    except UnreachableError:  # replicas look for themselves
        return source
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    _check_readable(name, pinned)
    return pinned


def _check_readable(name: str, source: ModelSource) -> None:
    """Raises ConfigError that begins with the name, for a pinned source that llama.cpp cannot read."""
    if store.is_in_openvinos_format(source):
        raise ConfigError(f"{name}: llama.cpp cannot read OpenVINO's format. Give a GGUF file")


def _defaults(configured: DefaultsConfig) -> ModelDefaults:
    """Raises ConfigError for a template that cannot be read."""
    template, kwargs = configured.chat_template, dict(configured.chat_template_kwargs)
    if configured.chat_template_file is not None:
        try:
            template = configured.chat_template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"defaults.chat_template_file: {error}") from None
    if configured.reasoning != "auto":
        kwargs["enable_thinking"] = configured.reasoning == "on"
    return ModelDefaults(
        given(configured, Api.OPENAI),
        configured.max_tokens,
        configured.system_prompt,
        template,
        kwargs,
        configured.reasoning_budget,
        configured.reasoning_budget_message,
        configured.reasoning_format,
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
    """Physical cores that a replica computes with."""
    threads = max(engine.threads or 0, engine.threads_batch or 0)
    return min(threads or share.n_cores, plan.n_cores(here, reserved))


def _memory_report(memory_bytes: int, n_replicas: int) -> str:
    gib = f"sized for {memory_bytes / 2**30:.1f} GiB of memory"
    return gib if n_replicas == 1 else f"{gib} for {n_replicas} replicas"


def _num_cpus(model: ModelConfig, share: Share, here: Machine) -> float:
    """The CPUs that Ray reserves for a replica, unless the deployment says otherwise: a core for
    each thread. Raises ConfigError for threads that cannot have a CPU each; the replica looks
    again, on its node."""
    engine, given = model.engine, model.deployment.ray_actor_options.num_cpus
    threads, cpus = max(engine.threads or 0, engine.threads_batch or 0), here.n_cpus
    complaint = None
    if given is None:
        whose = (
            "all that this machine may use (if replicas run on others, set "
            "deployment.ray_actor_options.num_cpus)"
        )
        complaint = oversubscription(threads, cpus, whose)
    elif given > 0:
        whose = "which deployment.ray_actor_options.num_cpus reserves"
        complaint = oversubscription(threads, max(1, math.floor(given)), whose)
    if complaint and not engine.allow_oversubscription:
        raise ConfigError(complaint)
    wanted = plan.cpus_for(here, threads)
    return max(share.num_cpus, wanted) if engine.threads is None else wanted


def _looked_up(
    model: ModelConfig, downloads: DownloadsConfig
) -> tuple[ModelSource, ProjectorSource | None, ModelNeeds | None]:
    """The sources of the model and of its projector at the version that they are now, and what the model
    needs, without its weights: None if it can be neither found here nor asked for, and the configuration
    leaves nothing open. Raises ConfigError for a model that cannot be served."""
    path = None if model.source.path is None else model.source.path.expanduser()
    is_sized = model.engine.n_slots is not None and model.engine.n_ctx_slot is not None
    if is_sized and path is not None and not path.exists():
        # Replicas look for themselves.
        return model.source, _projector(model, model.source, None, downloads), None
    try:
        source = store.pinned(model.source, downloads)
        if model.engine.backend == "llama.cpp" and store.is_in_openvinos_format(source):
            raise ConfigError(ONLY_OPENVINO)
        opened = Model(_vocabulary(source, downloads), vocab_only=True)
        needs = _with_draft(ModelNeeds.of(opened), opened, model, downloads)
        projector = _projector(model, source, opened, downloads)
        if projector is not None and not is_sized:
            n_bytes = needs.weight_bytes + _projector_bytes(projector, downloads)
            needs = replace(needs, weight_bytes=n_bytes)
        return source, projector, needs
    except UnreachableError:
        if not is_sized:
            raise
        return model.source, _projector(model, model.source, None, downloads), None


def _projector(
    model: ModelConfig, source: ModelSource, opened: Model | None, downloads: DownloadsConfig
) -> ProjectorSource | None:
    """The projector that is configured, or that the model's repository has, if that can be asked: `source`
    is pinned, and `opened` its model, None if it cannot. Raises ConfigError."""
    wanted = model.projector
    backends = ("llama.cpp",) if source.builtin else ("llama.cpp", "auto")
    if wanted is False or (wanted is None and model.engine.backend not in backends):
        return None
    if wanted is not None:
        _check_readable("projector", wanted)
    try:
        if wanted is not None:
            return store.pinned_projector(wanted, downloads)
        return None if opened is None else _projector_beside(model.id, source, opened, downloads)
    except UnreachableError as error:
        if wanted and store.names_a_file(wanted):
            return wanted  # replicas look for themselves
        raise ConfigError(f"projector: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"projector: {error}") from None


def _projector_beside(
    model_id: str, source: ModelSource, opened: Model, downloads: DownloadsConfig
) -> ProjectorSource | None:
    """The projector that the model's repository has. If that cannot be used, a warning says so: nobody
    asked for it. Raises UnreachableError."""
    try:
        found = store.projector_beside(source, downloads)
        if found is None or found.builtin:
            return found
        reason = why_unusable(_vocabulary(found, downloads), opened.meta_int("embedding_length", 0))
    except UnreachableError:
        raise
    except ConfigError as error:
        found, reason = None, str(error)
    if reason is None:
        return found
    logger.warning(
        "Model %s reads text only, as the projector beside it cannot be used: %s To have another one, name "
        "it in `projector`. To have none, and not this warning: `projector: false`.",
        model_id,
        f"{reason.rstrip('.')}.",
    )
    return None


def _vocabulary(source: ModelSource, downloads: DownloadsConfig) -> Path:
    """See `store.vocabulary`; replicas and ingresses may have it from here."""
    sharing = ClusterSharing() if ray.is_initialized() else ALONE
    return store.vocabulary(source, downloads, sharing)


def _draft_source(model: ModelConfig) -> ModelSource | None:
    return None if model.engine.draft is None else model.engine.draft.source


def _with_draft(
    needs: ModelNeeds, target: Model, model: ModelConfig, downloads: DownloadsConfig
) -> ModelNeeds:
    """The target's needs with those of its draft model, if it has one. Raises ConfigError if that
    cannot propose for it."""
    if model.engine.draft is not None and model.engine.draft.own_layers:
        check_own_layers(target)
        return replace(needs, draft_bytes=slot_bytes(target, N_CTX))
    source = _draft_source(model)
    if source is None:
        return needs
    is_sized = model.engine.n_slots is not None and model.engine.n_ctx_slot is not None
    if is_sized and source.path is not None and not source.path.expanduser().is_file():
        return needs  # replicas on other nodes look for themselves
    try:
        draft = Model(_vocabulary(source, downloads), vocab_only=True)
    except UnreachableError:
        if not is_sized:
            raise
        return needs
    except ConfigError as error:
        raise ConfigError(f"engine.draft: {error}") from None
    check_draft(target, draft)
    return needs.with_draft(ModelNeeds.of(draft), N_CTX)


def _projector_bytes(source: ProjectorSource, downloads: DownloadsConfig) -> int:
    """Raises ConfigError."""
    try:
        return _vocabulary(source, downloads).stat().st_size  # with a hole in it, maybe
    except UnreachableError:
        raise
    except ConfigError as error:
        raise ConfigError(f"projector: {error}") from None


def engine_options(
    configured: ModelConfig, model: ResolvedModel, max_loaded: int = 1
) -> dict[str, Any]:
    """Serve's options for one model's engine deployment. Of those that are loaded on demand, there are so
    many at once."""
    n_slots = model.options.n_slots
    defaults = {
        "name": f"engine-{model.id.replace('/', '--')}",
        "max_ongoing_requests": _BEYOND_PLACES * (n_slots + model.options.max_waiting)
        + _BACKGROUND_REQUESTS * n_slots
        + _CONTROL_REQUESTS,
        "max_queued_requests": 64,
        "graceful_shutdown_timeout_s": 30,
        "request_router_config": _ROUTER,
    }
    scaled = configured.deployment.autoscaling_config is not None
    autoscaling: dict[str, Any] = {
        "min_replicas": 1 if scaled else model.n_replicas,
        "max_replicas": model.n_replicas,
        "target_ongoing_requests": n_slots,  # if the policy is Serve's own
        "policy": _POLICY,
        "look_back_period_s": 15,
        "upscale_delay_s": 10,
    }
    if configured.keep_alive is not None:
        autoscaling |= on_demand.autoscaling(configured.keep_alive, max_loaded)
    options = _serve_options(configured.deployment, autoscaling, num_cpus=model.num_cpus)
    if model.standby is not None:
        options = on_demand.standing_by(options, model.standby)
    return defaults | options


def ingress_options(configured: IngressConfig, *, beside_on_demand: bool = False) -> dict[str, Any]:
    """Serve's options for the ingress deployment; whether there are models whose replicas come
    and go."""
    n_ongoing = configured.max_ongoing_requests
    defaults = {
        "max_queued_requests": n_ongoing,  # a burst is no reason for 503
        "graceful_shutdown_timeout_s": 600,
        "max_surge_percent": 100,
    }
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 4,
        "target_ongoing_requests": math.ceil(n_ongoing / 4),  # if the policy is Serve's own
        "policy": on_demand.BESIDE if beside_on_demand else _POLICY,
    }
    options = defaults | _serve_options(configured.deployment, autoscaling, num_cpus=0)
    # The ingress refuses with 429 what is more; Serve would let it wait, or answer 503.
    return options | {"max_ongoing_requests": n_ongoing + _CONTROL_REQUESTS}


def _serve_options(
    configured: DeploymentConfig, autoscaling: dict[str, Any], *, num_cpus: float
) -> dict[str, Any]:
    options = configured.model_dump(exclude_none=True, exclude={"autoscaling_config"})
    options["ray_actor_options"] = {"num_cpus": num_cpus} | options["ray_actor_options"]
    if configured.num_replicas is None:
        given = configured.autoscaling_config
        options["autoscaling_config"] = autoscaling | (
            {} if given is None else given.model_dump(exclude_unset=True)
        )
    return options
