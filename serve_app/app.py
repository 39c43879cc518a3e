"""`serve run` calls `build(args)`: configuration in, Serve application out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve._private.config import DeploymentConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app import __version__
from serve_app.base.errors import ConfigError, EngineUnavailableError
from serve_app.cluster.deployments import (
    engine_options,
    ingress_options,
    proxy_hides_strangers,
    refuse_strangers,
)
from serve_app.cluster.ingress import Ingress
from serve_app.cluster.ray_values import RayValues
from serve_app.cluster.replica import EngineReplica, OnDemandReplica
from serve_app.cluster.serve_check import check_serve
from serve_app.cluster.serve_handle import ServeHandle
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import ModelConfig, with_models, without
from serve_app.run.ingress import settings_for
from serve_app.run.model_host import ConfiguredHost
from serve_app.run.preflight import require_cache
from serve_app.run.resolving import resolve
from serve_app.store.models import added_models
from serve_app.store.shared_entries import AddedModels, Entry, added_application, share_by

logger = logging.getLogger("corral.config")
_BUILTIN = {"models": [{"id": "corral-demo", "source": {"builtin": True}}]}
_START_S = 60.0
"""The longest wait for the process of an added model, which is loaded later."""


def build(args: dict[str, Any]) -> Application:
    """The application for `applications[0].args`. Serve calls this, and gives no other argument. Without
    `args`, as in `serve run serve_app.app:build`, the model that comes with Corral is served.

    Raises RayServeException like `application`, and where this node has no folder to write to.
    """
    try:
        require_cache()
    except ConfigError as error:
        raise RayServeException(str(error)) from None
    return application(args or _BUILTIN)


def application(args: dict[str, Any], file: Path | None = None) -> Application:
    """The application for these `args`, which `file` has if one is given: all replicas are on this machine.

    Raises RayServeException with one message that names the fields that are wrong. This is the
    only kind of error that Serve shows as it is, and does not try again.
    """
    share_by(RayValues())
    if os.environ.get("RAY_AUTH_MODE") == "token":  # Ray sets it by itself where it finds a token
        logger.warning("Ray's commands need its token here: RAY_AUTH_MODE=token serve status")
    try:
        app = schema.parse(args, file)
        check_serve(app, file)
        refuse_strangers(app.ingress)
        left_out: dict[str, str] = {}
        models = resolve(app, left_out=left_out, only_here=file is not None)
    except ConfigError as error:
        raise RayServeException(str(error)) from None
    settings = settings_for(app, left_out, proxy_hides_strangers=proxy_hides_strangers())
    app = without(app, left_out)
    engines = [
        _engine(configured, model) for configured, model in zip(app.models, models, strict=True)
    ]
    ingress = Ingress.options(**ingress_options(app.ingress))  # type: ignore[attr-defined]
    host = ServeHost(app, models) if app.manage_models else None
    return ingress.bind(models, engines, settings, host)  # type: ignore[no-any-return]


class ServeHost(ConfiguredHost):
    """An ingress's ModelHost on Ray Serve. The engines of each added model are a Serve application of their
    own, so the others go on as they are. All ingresses may start and stop it, and the first one does."""

    def added_models(self) -> AddedModels:
        return added_models(self.app.downloads, _this_application())

    async def start(self, entry: Entry, model: ResolvedModel) -> ServeHandle:
        """Raises EngineUnavailableError if the cluster has no room for its process."""
        engine = _engine(with_models(self.app, [entry]).models[-1], model)
        name = added_application(_this_application(), model.id)
        self.entries[model.id] = entry
        try:
            async with asyncio.timeout(_START_S):
                return ServeHandle(await asyncio.to_thread(_running, engine, name))
        except (TimeoutError, RuntimeError) as error:
            await self.stop(model.id)
            raise EngineUnavailableError(f"No node has room for {model.id}: {error}") from error

    async def stop(self, model_id: str) -> None:
        self.entries.pop(model_id, None)
        name = added_application(_this_application(), model_id)
        await asyncio.to_thread(serve.delete, name)


def _running(engine: Application, name: str) -> DeploymentHandle[Any]:
    """The handle of an application, which is deployed unless it is there."""
    if name in serve.status().applications:
        return serve.get_app_handle(name)
    return serve.run(engine, name=name, route_prefix=None)


def _this_application() -> str:
    return str(serve.get_replica_context().app_name)


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


def fingerprint(model: ResolvedModel) -> str:
    """A text that changes when engines must be replaced. The memory that is free at this moment does not
    count, nor what only the ingress reads."""
    shares: Mapping[str, Any] = dict.fromkeys(model.memory_shares, 0)
    options = dataclasses.replace(model.options, **shares)
    counting = dataclasses.replace(
        model,
        options=options,
        aliases=(),
        tags=(),
        sizing="",
        n_replicas=0,
        waits_for_requests=False,
    )
    return blake2b(f"{__version__} {counting!r}".encode(), digest_size=16).hexdigest()
