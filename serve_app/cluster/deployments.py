"""Serve's options for the deployments, and the settings that ingresses are made with."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from serve_app.base.errors import ConfigError
from serve_app.config.addresses import is_loopback
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import IngressConfig, ModelConfig
from serve_app.config.serve_options import RayServeOptions
from serve_app.run.program import OWN_HTTP_OPTIONS

if TYPE_CHECKING:
    from ray.serve.config import HTTPOptions

# Room in a full replica for statistics, health checks and refusals, which its own bound does not count.
_CONTROL_REQUESTS = 16
# Serve refuses by totals, and the engine whoever takes most: so replicas accept more than there are places.
_BEYOND_PLACES = 2
# Those in the background have places of their own, for each slot.
_BACKGROUND_REQUESTS = 4
_POLICY = {"policy_function": "serve_app.cluster.autoscaling:by_pressure"}
SERVE_DEFAULTS = {"graceful_shutdown_wait_loop_s": 0.5, "max_constructor_retry_count": 3}
# Serve's router looks for a free replica again after 25 ms, growing to 500 ms, by default: too long
# for a slot to stand idle.
_ROUTER = {
    "request_router_class": "serve_app.cluster.request_router:PrefixRouter",
    "initial_backoff_s": 0.005,
    "backoff_multiplier": 1.5,
    "max_backoff_s": 0.05,
}


def engine_options(configured: ModelConfig, model: ResolvedModel) -> dict[str, Any]:
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
    if model.stages > 1:
        from ray.serve.config import GangPlacementStrategy, GangSchedulingConfig

        defaults["gang_scheduling_config"] = GangSchedulingConfig(
            gang_size=model.stages, gang_placement_strategy=GangPlacementStrategy.SPREAD
        )
        defaults["request_router_config"] = _ROUTER | {
            "request_router_kwargs": {"gang_size": model.stages}
        }
    scaled = configured.serve.autoscaling_config is not None
    autoscaling: dict[str, Any] = {
        "min_replicas": model.stages if scaled or model.on_demand else model.n_replicas,
        "max_replicas": model.n_replicas,
        "target_ongoing_requests": n_slots,  # if the policy is Serve's own
        "policy": _POLICY,
        "look_back_period_s": 15,
        "upscale_delay_s": 10,
    }
    given = _serve_options(configured.serve, autoscaling, num_cpus=model.num_cpus)
    options: dict[str, Any] = defaults | given
    if model.on_demand is not None:
        options["ray_actor_options"]["num_cpus"] = model.on_demand.reserved_cpus
        # Replicas of one model on a node would push each other out.
        options.setdefault("max_replicas_per_node", model.on_demand.max_on_node)
    return options


def ingress_options(configured: IngressConfig) -> dict[str, Any]:
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
        "policy": _POLICY,
    }
    options = defaults | _serve_options(configured.serve, autoscaling, num_cpus=0)
    # The ingress refuses with 429 what is more; Serve would let it wait, or answer 503.
    return options | {"max_ongoing_requests": n_ongoing + _CONTROL_REQUESTS}


def _serve_options(
    configured: RayServeOptions, autoscaling: dict[str, Any], *, num_cpus: float
) -> dict[str, Any]:
    options = SERVE_DEFAULTS | configured.explicit_options
    options["health_check_period_s"] = configured.health_check_period_s
    options["health_check_timeout_s"] = configured.health_check_timeout_s
    options["ray_actor_options"] = {
        "num_cpus": num_cpus
    } | configured.ray_actor_options.explicit_options
    if configured.num_replicas is None:
        options["autoscaling_config"] = autoscaling | (configured.autoscaling_config or {})
    return options


def refuse_strangers(ingress: IngressConfig) -> None:
    """Raises ConfigError where nobody could tell who comes from another machine, and it matters."""
    if ingress.trusted_proxies and _is_behind_haproxy():
        raise ConfigError(
            "RAY_SERVE_ENABLE_HA_PROXY=1 hides the addresses of proxies, so ingress.trusted_proxies would "
            "trust everybody. Serve without HAProxy, or remove ingress.trusted_proxies"
        )
    is_open = ingress.api_key_file is None and not ingress.allow_anonymous
    if is_open and proxy_hides_strangers():
        raise ConfigError(
            "RAY_SERVE_ENABLE_HA_PROXY=1 hides which requests come from other machines. Set "
            "http_options.host: 127.0.0.1 (this machine only), ingress.api_key_file, or "
            "ingress.allow_anonymous: true"
        )


def proxy_hides_strangers() -> bool:
    """Whether other machines' requests can look like this one's own: Serve's HAProxy asks the ingress over
    loopback, adds nothing to tell who asked, and listens where Serve's `http_options.host` says."""
    if not _is_behind_haproxy():
        return False
    serve = serve_client()
    host = None if serve is None else serve.http_config.host
    return host is None or not is_loopback(host)


def _is_behind_haproxy() -> bool:
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and own_http_options() is None


def own_http_options() -> HTTPOptions | None:
    """Serve's `http_options` if ingresses listen there themselves, because Serve has no proxies
    (`proxy_location: Disabled`); blocks. No client has a say in them: they stay while Serve runs. Raises
    ConfigError if they have what only a proxy can do."""
    import ray
    from ray.serve.config import HTTPOptions, ProxyLocation

    serve = serve_client()
    if (
        serve is None
        or ray.get(serve._controller.get_proxy_location.remote()) != ProxyLocation.Disabled
    ):
        return None
    options: HTTPOptions = serve.http_config
    defaults = HTTPOptions().model_dump() | options.model_dump(
        include=OWN_HTTP_OPTIONS | {"location"}
    )
    if others := [name for name, value in options.model_dump().items() if value != defaults[name]]:
        raise ConfigError(
            f"http_options.{others[0]} needs Serve's proxies. Remove it, or proxy_location: Disabled"
        )
    return options


def serve_client() -> Any:
    """Serve's client, or None if Serve does not run here."""
    import ray
    from ray.serve.context import _get_global_client

    if not ray.is_initialized():
        return None
    return _get_global_client(raise_if_no_controller_running=False)
