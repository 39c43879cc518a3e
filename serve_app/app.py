"""`serve run` calls `build(args)`: configuration in, Serve application out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ray.serve import Application
from ray.serve.exceptions import RayServeException

from serve_app.application import rollout
from serve_app.application.ingress_settings import access, batches, kept_responses, refuse_strangers
from serve_app.application.resolving import names_its_share, resolve
from serve_app.application.serve_options import engine_options, ingress_options
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import AppConfig
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
        rollout.keep(
            _replica(model).options(**engine_options(configured, model)).bind(model),
            model,
        )
        for configured, model in zip(app.models, models, strict=True)
    ]
    ingress = Ingress.options(**ingress_options(app.ingress))  # type: ignore[attr-defined]
    settings = access(app.ingress), app.ingress.sse_ping_interval_s, kept_responses(app.ingress)
    kept = batches(app.ingress.batch)
    return ingress.bind(models, engines, *settings, kept)  # type: ignore[no-any-return]


def _resolved(app: AppConfig) -> list[ResolvedModel]:
    """All models, with nothing left open. Raises ConfigError."""
    found = resolve(app.models, downloads=app.downloads, max_loaded=app.max_loaded_models)
    models = [
        replace(model, batches_may_scale=app.ingress.batch.may_scale, max_load_s=app.max_load_s)
        for model in found
    ]
    rollout.check_memory(
        [one for one, given in zip(models, app.models, strict=True) if not names_its_share(given)],
        machine.read().total_bytes,
    )
    return models


def _replica(model: ResolvedModel) -> Any:
    return EngineReplica if model.on_demand is None else OnDemandReplica
