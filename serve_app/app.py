"""`serve run` calls `build(args)`: configuration in, Serve application out."""

from __future__ import annotations

import math
import os
from typing import Any

import ray
from ray.serve import Application
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from serve_app.config import schema, sizing
from serve_app.config.model_files import locate
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import DeploymentConfig, IngressConfig, ModelConfig
from serve_app.errors import ConfigError
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.http.addresses import is_loopback
from serve_app.ingress.http.auth import Access
from serve_app.ingress.http.bodies import BodyLimits
from serve_app.llama.model import Model
from serve_app.placement.machine import available_memory, oversubscription, usable_cores
from serve_app.replica.deployment import EngineReplica

# Room in a full replica for statistics, health checks and refusals, which its own bound does not count.
_CONTROL_REQUESTS = 16
# Serve refuses by totals, and the engine whoever takes most: so replicas accept more than there are places.
_BEYOND_PLACES = 2
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
        models = [resolve(model, share=1 / len(app.models)) for model in app.models]
    except ConfigError as error:
        raise RayServeException(str(error)) from None
    engines = [
        EngineReplica.options(**engine_options(configured, model)).bind(model)  # type: ignore[attr-defined]
        for configured, model in zip(app.models, models, strict=True)
    ]
    ingress = Ingress.options(**ingress_options(app.ingress))  # type: ignore[attr-defined]
    ping_s = app.ingress.sse_ping_interval_s
    return ingress.bind(models, engines, access(app.ingress), ping_s)  # type: ignore[no-any-return]


def access(ingress: IngressConfig) -> Access:
    """Who may come in, by the configuration and by what stands before the ingress."""
    hidden = ingress.ui == "auto" and _proxy_hides_strangers()  # loopback means nothing then
    return Access(
        ingress.api_key_file,
        ingress.allow_anonymous,
        False if hidden else ingress.ui,
        tuple(ingress.cors_origins),
        tuple(ingress.allowed_hosts),
        ingress.anonymous_admin,
        BodyLimits(ingress.open_bodies, ingress.max_open_bodies_mib << 20, ingress.min_body_rate),
        ingress.max_ongoing_requests,
    )


def _refuse_strangers(ingress: IngressConfig) -> None:
    """Raises ConfigError where nobody could tell who comes from another machine, and it matters."""
    is_open = ingress.api_key_file is None and not ingress.allow_anonymous
    if is_open and _proxy_hides_strangers():
        raise ConfigError(
            "RAY_SERVE_ENABLE_HA_PROXY=1 hides who comes from another machine: set http_options.host: "
            "127.0.0.1 (this machine only), ingress.api_key_file, or ingress.allow_anonymous: true"
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


def resolve(model: ModelConfig, share: float) -> ResolvedModel:
    """Decide what the configuration leaves open, from the model file if it is here and this share
    of the machine: all models must fit on it. Raises ConfigError that names the model."""
    try:
        options = sizing.resolve(
            model.engine,
            _needs(model),
            cores=max(1, math.floor(share * usable_cores())),
            memory_bytes=math.floor(share * available_memory()),
        )
        num_cpus = _num_cpus(model, share)
    except ConfigError as error:
        raise ConfigError(f"models ({model.id}): {error}") from None
    return ResolvedModel(
        id=model.id,
        source=model.source,
        options=options,
        system_prompts=tuple(model.engine.system_prompts),
        threads=model.engine.threads,
        allow_oversubscription=model.engine.allow_oversubscription,
        pin_cores=model.engine.pin_cores,
        num_cpus=num_cpus,
        batch_wait_timeout_s=model.batch_wait_timeout_s,
    )


def _num_cpus(model: ModelConfig, share: float) -> float:
    """What Ray reserves for a replica, unless the deployment says otherwise: a core for each thread.
    Raises ConfigError for threads that cannot have one; the replica looks again, on its own node."""
    engine, given = model.engine, model.deployment.ray_actor_options.num_cpus
    threads, cores = max(engine.threads or 0, engine.threads_batch or 0), usable_cores()
    complaint = None
    if given is None:
        whose = (
            "all that this machine may use (if replicas run on others, set "
            "deployment.ray_actor_options.num_cpus)"
        )
        complaint = oversubscription(threads, cores, whose)
    elif given > 0:
        whose = "which deployment.ray_actor_options.num_cpus reserves"
        complaint = oversubscription(threads, max(1, math.floor(given)), whose)
    if complaint and not engine.allow_oversubscription:
        raise ConfigError(complaint)
    if engine.threads is None:  # replicas take what they get
        return max(_whole_or_fraction(share * cores), threads)
    return min(threads, cores)


def _whole_or_fraction(cpus: float) -> float:
    """Whole cores where there are any; a fraction is cut to what Ray can add up."""
    return math.floor(cpus) if cpus >= 1 else math.floor(100 * cpus) / 100


def _needs(model: ModelConfig) -> sizing.ModelNeeds | None:
    """What the model needs; None if the configuration leaves nothing open. Raises ConfigError for a file
    here that cannot be served."""
    if model.engine.n_slots is not None and model.engine.n_ctx_slot is not None:
        path = None if model.source.path is None else model.source.path.expanduser()
        if path is not None and path.is_file():  # replicas on other nodes look for themselves
            Model(path, vocab_only=True)
        return None
    return sizing.ModelNeeds.of(Model(locate(model.source), vocab_only=True))


def engine_options(configured: ModelConfig, model: ResolvedModel) -> dict[str, Any]:
    """Serve's options for one model's engine deployment."""
    options = model.options
    defaults = {
        "name": f"engine-{model.id.replace('/', '--')}",
        "max_ongoing_requests": _BEYOND_PLACES * (options.n_slots + options.max_waiting)
        + _CONTROL_REQUESTS,
        "max_queued_requests": 64,
        "graceful_shutdown_timeout_s": 30,
        "request_router_config": _ROUTER,
    }
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 1,
        "target_ongoing_requests": options.n_slots,  # if the policy is Serve's own
        "policy": _POLICY,
        "look_back_period_s": 15,
        "upscale_delay_s": 10,
    }
    return defaults | _serve_options(configured.deployment, autoscaling, num_cpus=model.num_cpus)


def ingress_options(configured: IngressConfig) -> dict[str, Any]:
    """Serve's options for the ingress deployment."""
    n_ongoing = configured.max_ongoing_requests
    defaults = {
        "max_queued_requests": n_ongoing,  # a burst is no reason for 503
        "graceful_shutdown_timeout_s": 600,
    }
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 4,
        "target_ongoing_requests": math.ceil(n_ongoing / 4),  # if the policy is Serve's own
        "policy": _POLICY,
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
