"""`serve run` calls `build(args)`: configuration in, Serve application out."""

from __future__ import annotations

from typing import Any

from ray.serve import Application
from ray.serve._private.config import DeploymentConfig
from ray.serve.exceptions import RayServeException

from serve_app.application.deployments import (
    engine_options,
    ingress_options,
    ingress_settings,
    refuse_strangers,
)
from serve_app.application.resolving import resolve_all
from serve_app.application.rollout import fingerprint
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import ModelConfig, with_models
from serve_app.errors import ConfigError
from serve_app.ingress.deployment import Ingress
from serve_app.replica.deployment import EngineReplica, OnDemandReplica
from serve_app.store.models import added_models


def build(args: dict[str, Any]) -> Application:
    """The application for `applications[0].args`.

    Raises RayServeException with one message that names the fields that are wrong: the only kind of error
    that Serve shows as it is, and does not try again.
    """
    try:
        app = schema.parse(args)
        if app.manage_models:
            app = with_models(app, [*added_models(app.downloads).read().values()])
        refuse_strangers(app.ingress)
        models = resolve_all(app)
    except ConfigError as error:
        raise RayServeException(str(error)) from None
    engines = [
        _engine(configured, model) for configured, model in zip(app.models, models, strict=True)
    ]
    ingress = Ingress.options(**ingress_options(app.ingress))  # type: ignore[attr-defined]
    return ingress.bind(models, engines, ingress_settings(app))  # type: ignore[no-any-return]


def _engine(configured: ModelConfig, model: ResolvedModel) -> Application:
    deployment: Any = EngineReplica if model.on_demand is None else OnDemandReplica
    bound = deployment.options(**engine_options(configured, model)).bind(model)
    return _keep(bound, model)


class _VersionedDeployment(DeploymentConfig):
    """A deployment whose replicas Serve leaves alone as long as this version of it stays the same.

    Serve gives all deployments of an application one version, made from all of its `args`: any change
    would restart all replicas. Not public, as of Serve 2.60.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "version" or self.version is None:
            super().__setattr__(name, value)


def _keep(engines: Application, model: ResolvedModel) -> Application:
    """A model's engines as an application, whose replicas are replaced only if their parts change."""
    deployment: Any = engines._bound_deployment
    configured = deployment._deployment_config
    kept = _VersionedDeployment.model_construct(**dict(configured))
    kept.version = fingerprint(model)
    deployment._deployment_config = kept
    return engines
