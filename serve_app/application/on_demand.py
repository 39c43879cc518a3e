"""Serve's options for models that are loaded on demand: with a process that stays, or without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serve_app.config.resolved import ResolvedModel, Standby
from serve_app.config.schema import AppConfig, ModelConfig
from serve_app.errors import ConfigError

BESIDE = {"policy_function": "serve_app.routing.on_demand:for_ingress"}
"""The policy of ingresses beside models whose processes come and go."""
_POLICY = {"policy_function": "serve_app.routing.on_demand:OnDemand"}
# That policy has the delays itself: who gives way to others does so at once.
_WHEN_ASKED_FOR = {
    "min_replicas": 0,
    "initial_replicas": 0,
    "look_back_period_s": 2,
    "downscale_delay_s": 0,
    "downscale_to_zero_delay_s": 0,
}


def comes_and_goes(model: ResolvedModel) -> bool:
    """Whether it has a process only while it is loaded."""
    return model.is_on_demand and model.standby is None


def with_standby(app: AppConfig, models: Sequence[ResolvedModel]) -> list[ResolvedModel]:
    """The models; those on demand keep a process each as `standby` says, or if none of them has several
    replicas. Raises ConfigError if it says so, and one has."""
    given = list(zip(app.models, models, strict=True))
    several = [model.id for configured, model in given if _may_have_several(configured, model)]
    if app.standby and several:
        raise ConfigError(
            f"standby: {', '.join(several)} may have several replicas, of which none stands by. Leave out "
            "deployment.autoscaling_config, or set standby: false"
        )
    if several or app.standby is False:
        return list(models)
    n_on_demand = sum(model.is_on_demand for model in models)
    part = min(app.max_loaded_models, n_on_demand) / max(1, n_on_demand)
    return [_standing_by(*one, app.max_loaded_models, part) for one in given]


def _may_have_several(configured: ModelConfig, model: ResolvedModel) -> bool:
    scales = configured.deployment.autoscaling_config is not None
    return model.is_on_demand and (scales or model.n_replicas > 1)


def _standing_by(
    configured: ModelConfig, model: ResolvedModel, max_loaded: int, part: float
) -> ResolvedModel:
    if configured.keep_alive is None:
        return model
    reserved = configured.deployment.ray_actor_options.num_cpus
    num_cpus = model.num_cpus if reserved is None else reserved
    # Together they reserve what those take that are loaded at once.
    reserved_cpus = math.floor(100 * part * num_cpus) / 100
    return replace(
        model, standby=Standby(configured.keep_alive, max_loaded, num_cpus, reserved_cpus)
    )


def standing_by(options: dict[str, Any], standby: Standby) -> dict[str, Any]:
    """Serve's options for a model with a process that stays, from those of one that is always loaded."""
    actor = options["ray_actor_options"] | {"num_cpus": standby.reserved_cpus}
    kept = {name: value for name, value in options.items() if name != "autoscaling_config"}
    return kept | {"num_replicas": 1, "ray_actor_options": actor}


def autoscaling(keep_alive_s: float, max_loaded: int) -> dict[str, Any]:
    """How Serve scales a model without such a process; so many are loaded at once."""
    settings = {"keep_alive_s": keep_alive_s, "max_loaded": max_loaded}
    return _WHEN_ASKED_FOR | {"policy": _POLICY | {"policy_kwargs": settings}}
