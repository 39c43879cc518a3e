"""`serve run` calls `build(args)`: configuration in, Serve application out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray.serve import Application
from ray.serve.exceptions import RayServeException

from serve_app.application import rollout
from serve_app.application.deployments import (
    access,
    batches,
    engine_options,
    ingress_options,
    kept_responses,
    refuse_strangers,
)
from serve_app.application.resolving import names_its_share, resolve
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import AppConfig, ModelConfig
from serve_app.errors import ConfigError
from serve_app.ingress.deployment import Ingress
from serve_app.placement import machine
from serve_app.replica.deployment import EngineReplica
from serve_app.replica.on_demand import OnDemandReplica


def build(args: dict[str, Any]) -> Application:
    """The application for `applications[0].args`.

    Raises RayServeException with one message that names the fields that are wrong: the only kind of error
    that Serve shows as it is, and does not try again.
    """
    try:
        app = schema.parse(args)
        refuse_strangers(app.ingress)
        models = _resolved(app)
    except ConfigError as error:
        raise RayServeException(str(error)) from None
    engines = [
        _engine(configured, model) for configured, model in zip(app.models, models, strict=True)
    ]
    ingress = Ingress.options(**ingress_options(app.ingress))  # type: ignore[attr-defined]
    return ingress.bind(  # type: ignore[no-any-return]
        models,
        engines,
        access(app.ingress, data_at_rest=app.data_at_rest is True),
        app.ingress.sse_ping_interval_s,
        kept_responses(app.ingress),
        batches(app.ingress.batch, encrypts=app.data_at_rest == "encrypted"),
    )


def _resolved(app: AppConfig) -> list[ResolvedModel]:
    """All models, with nothing left open. Raises ConfigError."""
    models = [
        replace(
            model,
            batches_may_scale=app.ingress.batch.may_scale,
            max_load_s=app.max_load_s,
            data_at_rest=app.data_at_rest is True,
            encrypts_folders=app.data_at_rest == "encrypted",
        )
        for model in resolve(app.models, downloads=app.downloads, max_loaded=app.max_loaded_models)
    ]
    here_alone = [
        model
        for model, configured in zip(models, app.models, strict=True)
        if not names_its_share(configured)
    ]
    rollout.check_memory(here_alone, machine.read().total_bytes)
    return models


def _engine(configured: ModelConfig, model: ResolvedModel) -> Application:
    deployment: Any = EngineReplica if model.on_demand is None else OnDemandReplica
    bound = deployment.options(**engine_options(configured, model)).bind(model)
    return rollout.keep(bound, model)
