"""The ingress as a Serve deployment."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app import heap
from serve_app.channel.listener import Listener
from serve_app.config.resolved import ResolvedModel
from serve_app.ingress.access.auth import Access
from serve_app.ingress.access.turnstile import OpenRequests
from serve_app.ingress.adapters import AdapterControl, numbered
from serve_app.ingress.api import WORKER_MODULES, build_api
from serve_app.ingress.batch.store import BatchOptions
from serve_app.ingress.handle_client import HandleClient
from serve_app.ingress.media.decoder import opened
from serve_app.ingress.model_registry import ModelFile, ServedModel
from serve_app.ingress.responses.actor import RayStore
from serve_app.ingress.responses.background import BackgroundResponses
from serve_app.ingress.responses.store import Bounds
from serve_app.ingress.versions.control import VersionControl, VersionMetrics
from serve_app.ingress.workers.pool import WorkerPool
from serve_app.llama.vision.senses import NO_SENSES
from serve_app.llama.vision.senses import senses as senses_of
from serve_app.logs import forward_to_serve
from serve_app.routing import broadcast, reports
from serve_app.routing.autoscaling import PRESSURE, ingress_pressure
from serve_app.store.encryption import check_encrypted
from serve_app.store.models import vocabulary
from serve_app.store.shared_entries import LoadedAdapters, VersionWeights
from serve_app.store.sharing import ClusterSharing

logger = logging.getLogger("corral.ingress")

_TELL_S, _LOOK_EVERY_S = 2.0, 5.0
"""However a change that ingresses share was missed, it is known here after so long."""


def _file(model: ResolvedModel, path: Path) -> ModelFile:
    """The file with the model's vocabulary, for this process and the workers. Raises ConfigError."""
    senses = NO_SENSES
    if model.projector is not None:
        senses = senses_of(vocabulary(model.projector, model.downloads))
    return ModelFile(
        str(path),
        model.name,
        model.options.n_ctx_slot,
        model.options.embedding_pooling,
        model.defaults,
        aliases=model.aliases,
        tags=model.tags,
        n_ctx_text=model.options.n_ctx_share,
        adapters=numbered(model),
        senses=senses,
        is_on_demand=model.on_demand is not None,
        version=model.version,
    )


async def _listener() -> Listener:
    """The listener for channels from engines to this process, whose address its calls have from now on."""
    context: Any = ray.get_runtime_context()
    node_ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    listener = Listener(context.get_node_id(), node_ip, reports.HERE.connection)
    reports.HERE.address = await listener.address()
    return listener


async def _tell_ingresses() -> None:
    """Have all ingresses look at what they share, which has changed. Those that do not hear this look by
    themselves before long."""
    await broadcast.ask_all(_ingresses(), "look_again", timeout_s=_TELL_S)


@functools.cache
def _ingresses() -> DeploymentHandle[Any]:
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


@serve.deployment
@serve.ingress()
class Ingress:
    """Speaks HTTP; holds every model's vocabulary and a handle to its engines."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        models: list[ResolvedModel],
        handles: list[DeploymentHandle[Any]],
        access: Access,
        sse_ping_interval_s: float,
        kept_responses: Bounds,
        batches: BatchOptions | None = None,
    ) -> None:
        forward_to_serve(keeps_texts=access.data_at_rest)
        if batches is not None and batches.is_encrypted:
            check_encrypted("ingress.batch.folder", batches.folder)
        heap.give_back()
        self._access = access
        self._open = OpenRequests(access.max_requests)
        self._cpu_s, self._cpu_at = time.process_time(), time.monotonic()
        self._sse_ping_interval_s, self._batches = sse_ping_interval_s, batches
        paths = [
            await asyncio.to_thread(vocabulary, model.source, model.downloads, ClusterSharing())
            for model in models
        ]
        files = [
            await asyncio.to_thread(_file, model, path)
            for model, path in zip(models, paths, strict=True)
        ]
        self._workers = WorkerPool(files, WORKER_MODULES, opened, keeps_texts=access.data_at_rest)
        listener = await _listener()
        self._models: dict[str, ServedModel] = {}
        app = serve.get_replica_context().app_name
        self._adapters = AdapterControl(
            self._models,
            {model.name: model for model in models},
            self._workers,
            LoadedAdapters(app),
            _tell_ingresses,
        )
        for model, file, handle in zip(models, files, handles, strict=True):
            info = opened(file)
            if not info.tokenizer.has_template:
                logger.warning("%s has no chat template. Its chats get ChatML.", model.id)
            client = HandleClient(
                handle,
                info.tokenizer.model.vocabulary_key,
                listener,
                model.max_load_s,
                model.name,
                self._adapters,
                is_on_demand=info.is_on_demand,
            )
            self._models[model.name] = info.served_by(client)
        self._versions = VersionControl(
            self._models, VersionWeights(app), _tell_ingresses, VersionMetrics().update
        )
        self._workers.weights = self._versions.given
        await asyncio.gather(self._adapters.look(), self._versions.start())
        self._watching = asyncio.create_task(self._watch())
        self._responses = BackgroundResponses(self._models, RayStore(kept_responses), self._open)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(
            self._models,
            self._access,
            self._workers,
            self._sse_ping_interval_s,
            self._open,
            self._responses,
            self._batches,
            self._versions,
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look_again()

    async def look_again(self) -> bool:
        """Look at what ingresses share, which has changed: see `_tell_ingresses`."""
        await asyncio.gather(self._adapters.look(), self._versions.look())
        return True

    async def adopt_response(self, response_id: str) -> bool:
        """Go on with a response whose ingress is gone: the store asks some ingress for that."""
        return await self._responses.adopt(response_id)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what `serve_app.routing.autoscaling` learns of this replica."""
        cpu_s, at = self._cpu_s, self._cpu_at
        self._cpu_s, self._cpu_at = time.process_time(), time.monotonic()
        cpu_share = (self._cpu_s - cpu_s) / max(1e-3, self._cpu_at - at)
        open_part = len(self._open) / self._open.limit
        return {PRESSURE: ingress_pressure(open_part, cpu_share)}
