"""The ingress: every model's vocabulary, the way to its engines, and the application with all routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastapi import FastAPI

from serve_app.apis.api import WORKER_MODULES, build_api
from serve_app.apis.responses.store import ResponseStore, Store
from serve_app.base import heap
from serve_app.channel import routing_reports as reports
from serve_app.channel.handle import ReplicaHandle
from serve_app.channel.listener import Listener
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import AppConfig, IngressConfig
from serve_app.kernels.llama.vision.senses import NO_SENSES, ProjectorFile
from serve_app.prompt.tokenizer import forget_tokenizers
from serve_app.server.access.turnstile import OpenRequests
from serve_app.server.adapters import AdapterControl, number_adapters
from serve_app.server.handle_client import HandleClient
from serve_app.server.media.decoder import open_model
from serve_app.server.model_control import ModelControl, ModelHost
from serve_app.server.model_registry import ModelFile, ServedModel
from serve_app.server.workers.pool import WorkerPool
from serve_app.store.encryption import check_encrypted
from serve_app.store.models import vocabulary
from serve_app.store.shared_entries import LoadedAdapters

logger = logging.getLogger("corral.ingress")

_LOOK_EVERY_S = 5.0
"""However a change that ingresses share was missed, it is known here after so long."""


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """The settings of all ingresses of an application."""

    config: IngressConfig
    data_at_rest: bool | Literal["encrypted"] = True

    @property
    def keeps_texts(self) -> bool:
        """Whether clients' texts may lie on any disk."""
        return self.data_at_rest is True


def settings_for(app: AppConfig, *, proxy_hides_strangers: bool = False) -> IngressSettings:
    """The settings of all ingresses of an application. The page keeps conversations in the browser, so
    there is none without data at rest. Where a proxy hides strangers, loopback means nothing."""
    ingress, data_at_rest = app.ingress, app.data_at_rest
    if data_at_rest is not True or (ingress.ui == "auto" and proxy_hides_strangers):
        ingress = ingress.model_copy(update={"ui": False})
    return IngressSettings(ingress, data_at_rest)


async def _tell_nobody() -> None:
    """There are no other ingresses."""


@dataclass(frozen=True, slots=True)
class IngressPlace:
    """The place of one ingress: what Serve, or a local server, gives to its process."""

    app: str
    node_id: str
    host: str
    """The address at which other nodes' engines reach this process."""
    handles: Sequence[ReplicaHandle]
    """The way to each model's replicas."""
    store: ResponseStore = field(default_factory=Store)
    """The responses that all ingresses keep."""
    tell_ingresses: Callable[[], Awaitable[None]] = _tell_nobody
    """Has all ingresses look at what they share, which has changed."""
    model_host: ModelHost | None = None
    """Starts engines of models that operators add while serving, if they may."""
    forks_workers: bool = False
    """Whether the process may be forked when the ingress starts: nothing else runs in it."""


def _vocabulary_file(model: ResolvedModel) -> ModelFile:
    """The file with the model's vocabulary, for all processes here; blocks. Raises ConfigError."""
    path = vocabulary(model.source, model.downloads)
    senses = NO_SENSES
    if model.projector is not None:
        senses = ProjectorFile(vocabulary(model.projector, model.downloads)).senses
    return ModelFile(
        str(path),
        model.id,
        model.options.n_ctx_slot,
        model.options.embedding_pooling,
        model.defaults,
        aliases=model.aliases,
        tags=model.tags,
        adapters=number_adapters(model),
        senses=senses,
        is_on_demand=model.on_demand is not None,
    )


class IngressServer:
    """Answers requests for all models, by their engines. Used in one event loop."""

    async def start(
        self, models: list[ResolvedModel], settings: IngressSettings, place: IngressPlace
    ) -> None:
        """Open the vocabularies, and start the workers. To be called first and once. Raises ConfigError."""
        if settings.data_at_rest == "encrypted":
            folder = settings.config.batch.folder
            check_encrypted("ingress.batch.folder", folder and folder.expanduser())
        heap.give_back()
        self._settings, self._place = settings, place
        self.open_requests = OpenRequests(settings.config.max_ongoing_requests)
        self._files: dict[str, ModelFile] = {}
        for model in models:
            self._files[model.id] = await asyncio.to_thread(_vocabulary_file, model)
        self._opened = {f.id: open_model(f) for f in self._files.values() if place.forks_workers}
        heap.trim()
        self._workers = WorkerPool(
            *([*self._files.values()], WORKER_MODULES, open_model),
            keeps_texts=settings.keeps_texts,
            opened=self._opened if place.forks_workers else None,
        )
        self._listener = Listener(place.node_id, place.host, reports.HERE.connection)
        reports.HERE.address = await self._listener.address()
        self._models: dict[str, ServedModel] = {}
        self._resolved = {model.id: model for model in models}
        self._adapters = AdapterControl(
            self._models,
            self._resolved,
            self._workers,
            LoadedAdapters(place.app),
            place.tell_ingresses,
        )
        for model, handle in zip(models, place.handles, strict=True):
            self._models[model.id] = self._served_model(model, handle)
        forget_tokenizers()
        await self._adapters.look()
        self._watching = asyncio.create_task(self._watch())
        self._control = None
        if place.model_host is not None:
            self._control = ModelControl(self._models, self, place.model_host, place.tell_ingresses)
            await self._control.restore()

    def _served_model(self, model: ResolvedModel, handle: ReplicaHandle) -> ServedModel:
        """A model, whose vocabulary is read, with the way to its engines."""
        info = self._opened.pop(model.id, None) or open_model(self._files[model.id])
        if not info.tokenizer.has_template:
            logger.warning("%s has no chat template. Its chats get ChatML.", model.id)
        client = HandleClient(
            handle,
            info.tokenizer.model.vocabulary_key,
            self._listener,
            model.id,
            self._adapters,
            is_on_demand=info.is_on_demand,
        )
        return info.served_by(client)

    async def add(self, models: Sequence[tuple[ResolvedModel, ReplicaHandle]]) -> None:
        """Serve more models from now on. Raises ConfigError, and serves none of them then."""
        served = {}
        try:
            for model, handle in models:
                self._files[model.id] = await asyncio.to_thread(_vocabulary_file, model)
                served[model.id] = await asyncio.to_thread(self._served_model, model, handle)
            await self._workers.renew(list(self._files.values()))
        except BaseException:
            for model, _ in models:
                self._files.pop(model.id, None)
            raise
        finally:
            forget_tokenizers()
        self._resolved |= {model.id: model for model, _ in models}
        self._models |= served

    async def drop(self, model_id: str) -> None:
        """Serve a model no more."""
        del self._models[model_id], self._resolved[model_id], self._files[model_id]
        await self._workers.renew(list(self._files.values()))

    def api(self) -> FastAPI:
        """The application with all routes."""
        return build_api(
            self._models,
            self._settings.config,
            self._workers,
            self.open_requests,
            self._place.store,
            self._control,
        )

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look_again()

    async def look_again(self) -> bool:
        """Look at what ingresses share, which has changed."""
        await self._adapters.look()
        if self._control is not None:
            await self._control.look()
        return True
