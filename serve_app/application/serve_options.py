"""Serve's options for the deployments."""

from __future__ import annotations

import math
from typing import Any

from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import DeploymentConfig, IngressConfig, ModelConfig

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


def engine_options(configured: ModelConfig, model: ResolvedModel) -> dict[str, Any]:
    """Serve's options for one model's engine deployment."""
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
        "min_replicas": 1 if scaled or model.on_demand else model.n_replicas,
        "max_replicas": model.n_replicas,
        "target_ongoing_requests": n_slots,  # if the policy is Serve's own
        "policy": _POLICY,
        "look_back_period_s": 15,
        "upscale_delay_s": 10,
    }
    given = _serve_options(configured.deployment, autoscaling, num_cpus=model.num_cpus)
    options: dict[str, Any] = defaults | given
    if model.on_demand is not None:
        options["ray_actor_options"]["num_cpus"] = model.on_demand.reserved_cpus
        # Replicas of one model on a node would push each other out.
        options.setdefault("max_replicas_per_node", model.on_demand.max_on_node)
    return options


def ingress_options(configured: IngressConfig) -> dict[str, Any]:
    """Serve's options for the ingress deployment."""
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
