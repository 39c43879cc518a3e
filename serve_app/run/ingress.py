"""The ingress: every model's vocabulary, the way to its engines, and the application with all routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastapi import FastAPI

from serve_app.apis.api import WORKER_MODULES, build_api
from serve_app.apis.responses.store import ResponseStore, Store
from serve_app.base import heap
from serve_app.base.errors import ConfigError
from serve_app.channel import routing_reports as reports
from serve_app.channel.handle import NoReplicas, ReplicaHandle
from serve_app.channel.listener import Listener
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import AppConfig, IngressConfig
from serve_app.kernels.llama.vision.senses import NO_SENSES, ProjectorFile
from serve_app.prompt.tokenizer import forget_tokenizers
from serve_app.run.program import DRAIN_S
from serve_app.server.access.turnstile import OpenRequests
from serve_app.server.adapters import AdapterControl, number_adapters
from serve_app.server.handle_client import HandleClient
from serve_app.server.media.decoder import open_model
from serve_app.server.model_control import ModelControl, ModelHost
from serve_app.server.model_registry import ModelFile, ModelInfo, ServedModel, open_or_leave_out
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
    left_out: tuple[ModelFile, ...] = ()
    """The models whose files cannot be used, with the reasons."""

    @property
    def keeps_texts(self) -> bool:
        """Whether clients' texts may lie on any disk."""
        return self.data_at_rest is True


def settings_for(
    app: AppConfig, left_out: Mapping[str, str], *, proxy_hides_strangers: bool = False
) -> IngressSettings:
    """The settings of all ingresses of an application; `left_out` has the reasons of models that are. The
    page keeps conversations in the browser, so there is none without data at rest. Where a proxy hides
    strangers, loopback means nothing."""
    ingress, data_at_rest = app.ingress, app.data_at_rest
    if data_at_rest is not True or (ingress.ui == "auto" and proxy_hides_strangers):
        ingress = ingress.model_copy(update={"ui": False})
    files = (
        ModelFile(m.id, 0, "", aliases=m.aliases, tags=m.tags, problem=left_out[m.id])
        for m in app.models
        if m.id in left_out
    )
    return IngressSettings(ingress, data_at_rest, tuple(files))


async def _tell_nobody() -> None:
    """Tell nobody: there are no other ingresses."""


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
        model.id,
        model.options.n_ctx_slot,
        str(path),
        model.options.embedding_pooling,
        senses,
        defaults=model.defaults,
        aliases=model.aliases,
        tags=model.tags,
        adapters=number_adapters(model),
        is_on_demand=model.on_demand is not None,
        waits_for_requests=model.waits_for_requests,
    )


def _readable_file(model: ResolvedModel) -> ModelFile:
    """The file with the model's vocabulary, or the reason why there is none; blocks."""
    try:
        return _vocabulary_file(model)
    except (ConfigError, OSError) as error:
        n_ctx_slot, names, tags = model.options.n_ctx_slot, model.aliases, model.tags
        return ModelFile(model.id, n_ctx_slot, "", aliases=names, tags=tags, problem=str(error))


@dataclass(frozen=True, slots=True)
class IngressParts:
    """The parts of an ingress: what reads bodies, what hears from engines, and the models."""

    settings: IngressSettings
    place: IngressPlace
    files: dict[str, ModelFile]
    resolved: dict[str, ResolvedModel]
    models: dict[str, ServedModel]
    workers: WorkerPool
    listener: Listener
    adapters: AdapterControl
    watching: asyncio.Task[None]
    """The workers' watch."""


async def open_parts(
    models: list[ResolvedModel], settings: IngressSettings, place: IngressPlace
) -> IngressParts:
    """Open the vocabularies, and start the workers. A model whose vocabulary cannot be read is left
    out, unless it is the last one. Raises ConfigError."""
    if settings.data_at_rest == "encrypted":
        folder = settings.config.batch.folder
        check_encrypted("ingress.batch.folder", folder and folder.expanduser())
    heap.give_back()
    files, opened = await _open_files(models, settings)
    heap.trim()
    workers = WorkerPool(
        *([*files.values()], WORKER_MODULES, open_model),
        keeps_texts=settings.keeps_texts,
        opened=opened if place.forks_workers else None,
        options=settings.config.serve,
    )
    watching = asyncio.create_task(workers.watch())
    listener = Listener(place.node_id, place.host, reports.HERE.connection)
    reports.HERE.address = await listener.address()
    served: dict[str, ServedModel] = {}
    resolved = {model.id: model for model in models}
    adapters = AdapterControl(
        served, resolved, workers, LoadedAdapters(place.app), place.tell_ingresses
    )
    handles = dict(zip(resolved, place.handles, strict=True))
    for name in files:
        handle = handles.get(name) or NoReplicas(opened[name].problem)
        served[name] = _served_model(opened[name], handle, listener, adapters)
    forget_tokenizers()
    await adapters.look()
    return IngressParts(
        settings,
        place,
        files=files,
        resolved=resolved,
        models=served,
        workers=workers,
        listener=listener,
        adapters=adapters,
        watching=watching,
    )


async def _open_files(
    models: Sequence[ResolvedModel], settings: IngressSettings
) -> tuple[dict[str, ModelFile], dict[str, ModelInfo]]:
    """The files of all models, those that can be read first, and what they tell. Raises ConfigError if
    none can be."""
    files: dict[str, ModelFile] = {}
    for model in models:
        files[model.id] = await asyncio.to_thread(_readable_file, model)
    files |= {file.id: file for file in settings.left_out}
    opened = {f.id: open_or_leave_out(f, open_model) for f in files.values()}
    if models and all(info.problem for info in opened.values()):
        raise ConfigError("; ".join(f"{info.id}: {info.problem}" for info in opened.values()))
    # Requests without a name get the first model that is served.
    names = sorted(opened, key=lambda name: bool(opened[name].problem))
    return {name: files[name] for name in names}, opened


def _served_model(
    info: ModelInfo, handle: ReplicaHandle, listener: Listener, adapters: AdapterControl
) -> ServedModel:
    """A model with the way to its engines."""
    writes = not info.problem and info.purpose == "text"
    if writes and not info.tokenizer.has_template:
        logger.warning("%s has no chat template. Its chats get ChatML.", info.id)
    key = b"" if info.problem else info.tokenizer.model.vocabulary_key
    client = HandleClient(handle, key, listener, info.id, adapters, is_on_demand=info.is_on_demand)
    return info.served_by(client)


class IngressServer:
    """Answers requests for all models, by their engines. Used in one event loop."""

    def __init__(self, parts: IngressParts) -> None:
        """The object owns the parts from now on. Call `restore` before the first request."""
        self.open_requests = OpenRequests(parts.settings.config.max_ongoing_requests)
        self._settings, self._place = parts.settings, parts.place
        self._files, self._resolved, self._models = parts.files, parts.resolved, parts.models
        self._workers, self._listener = parts.workers, parts.listener
        self._adapters = parts.adapters
        self._control: ModelControl | None = None
        if (host := parts.place.model_host) is not None:
            self._control = ModelControl(self._models, self, host, parts.place.tell_ingresses)
        self._tasks = [parts.watching, asyncio.create_task(self._watch())]

    @classmethod
    async def open(
        cls, models: list[ResolvedModel], settings: IngressSettings, place: IngressPlace
    ) -> IngressServer:
        """An ingress that is ready for requests. Raises ConfigError: see `open_parts`."""
        ingress = cls(await open_parts(models, settings, place))
        await ingress.restore()
        return ingress

    async def restore(self) -> None:
        """Serve the models, too, that operators added before."""
        if self._control is not None:
            await self._control.restore()

    async def add(self, models: Sequence[tuple[ResolvedModel, ReplicaHandle]]) -> None:
        """Serve more models from now on. Raises ConfigError, and serves none of them then."""
        served = {}
        try:
            for model, handle in models:
                file = await asyncio.to_thread(_vocabulary_file, model)
                info = await asyncio.to_thread(open_model, file)
                self._files[model.id] = file
                served[model.id] = _served_model(info, handle, self._listener, self._adapters)
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

    @property
    def drain_s(self) -> float:
        """The longest time that running answers have to end."""
        drain_s = self._settings.config.serve.graceful_shutdown_timeout_s
        return DRAIN_S if drain_s is None else drain_s

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.open_requests.is_draining = True

    async def close(self) -> None:
        """End the workers, those that hang among them. What they read ends with EngineClosedError."""
        for task in self._tasks:
            task.cancel()
        await self._workers.close()

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
