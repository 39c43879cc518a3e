"""Models that operators add and remove while serving: downloads, and what is kept for the next start."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

from serve_app.base.errors import (
    ConfigError,
    CorralError,
    InvalidRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
    QueueFullError,
)
from serve_app.base.progress import Stage
from serve_app.channel.handle import ReplicaHandle
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import ModelSource
from serve_app.server.http import request_context
from serve_app.server.http.dependencies import of_app
from serve_app.server.model_registry import ServedModel, find, usable
from serve_app.store import models as store
from serve_app.store.remote import RemoteModel
from serve_app.store.shared_entries import MOST_ADDED, AddedModels, Entry

logger = logging.getLogger("corral.ingress")

Started = tuple[ResolvedModel, ReplicaHandle]

KEEP_ALIVE = "5m"
"""Ollama's: an added model is unloaded when nobody has asked for it for so long."""
_AT_ONCE, _MOST_WAITING = 2, 8
"""Downloads at once, and downloads that run in the background or wait for their turn."""
_TELL_EVERY_S, _LOOK_EVERY_S = 0.2, 0.5
_EVENTS_S = 3600.0
_OF_CONFIGURATION = re.compile(r"^invalid configuration: models\.\d+\.|Value error, ")
"""The parts of an error that tell where the entry would be, which is nothing to a client."""


class ModelHost(Protocol):
    """The part of a server that starts and ends models' engines while it serves."""

    @property
    def configured_models(self) -> Sequence[ResolvedModel]:
        """The models of the configuration."""

    def added_models(self) -> AddedModels:
        """The models that earlier servers were told to add."""

    def entry(self, model_id: str) -> Entry | None:
        """The configuration's entry of a model, without its names; None if there is none."""

    async def resolve(self, entry: Entry) -> ResolvedModel:
        """Decide what the entry of one more model leaves open. Raises ConfigError."""

    async def start(self, entry: Entry, model: ResolvedModel) -> ReplicaHandle:
        """Start the engine's process of a model that was resolved."""

    async def stop(self, model_id: str) -> None:
        """End a model's process, after the answers that run, if they end soon."""


class Registry(Protocol):
    """The models that an ingress serves."""

    async def add(self, models: Sequence[Started]) -> None:
        """Serve more models from now on. Raises ConfigError, and serves none of them then."""

    async def drop(self, model_id: str) -> None:
        """Serve a model no more."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A step of a download, in Ollama's words. Source: ollama, api/types.go, `ProgressResponse`."""

    status: str
    digest: str | None = None
    total: int | None = None
    """The bytes of a file."""
    completed: int | None = None


class ModelControl:
    """Used in one ingress's event loop."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        registry: Registry,
        host: ModelHost,
        tell_ingresses: Callable[[], Awaitable[None]],
    ) -> None:
        self._models, self._registry, self._host = models, registry, host
        self._tell_ingresses = tell_ingresses
        self._kept = host.added_models()
        self._added: dict[str, tuple[Entry, ResolvedModel]] = {}
        self._changing, self._pulling = asyncio.Lock(), asyncio.Semaphore(_AT_ONCE)
        self._background: dict[str, asyncio.Task[None]] = {}
        """The downloads that nobody waits for, by the models' ids."""
        self._steps: dict[str, PullProgress] = {}
        """The last step of each of these."""
        self._left_out: dict[str, Entry] = {}
        """The entries that cannot be served."""
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Serve what other ingresses have added meanwhile, and no more what they have removed."""
        if not self._kept.are_shared:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.restore())
        await asyncio.shield(self._looking)  # whoever waits may leave

    async def restore(self) -> None:
        """Serve what was added: before this start, or by other ingresses. A model that cannot be served is
        left out, and the log says why. Raises nothing."""
        async with self._changing:
            try:
                entries = await asyncio.to_thread(self._kept.read)
            except Exception as error:  # Ray's head may be away for a moment
                logger.warning("The list of added models could not be read: %r.", error)
                return
            for model_id in self._added.keys() - entries.keys():
                await self._remove(model_id)
            started: list[tuple[Entry, Started]] = []
            for model_id, entry in entries.items():
                before = self._left_out.get(model_id)
                if model_id in self._added:
                    before, _ = self._added[model_id]
                if before == entry:
                    continue
                try:
                    model = await self._host.resolve(entry)
                    started.append((entry, (model, await self._host.start(entry, model))))
                except CorralError as error:
                    self._left_out[model_id] = entry
                    logger.error("The model %s, which was added, is left out: %s", model_id, error)
            for _, (model, _) in started:
                if self._added.pop(model.id, None) is not None:
                    await self._registry.drop(model.id)
            try:
                await self._registry.add([pair for _, pair in started])
            except CorralError as error:
                logger.error("Models that were added are left out: %s", error)
                self._left_out |= {entry["id"]: entry for entry, _ in started}
                for _, (model, _) in started:
                    await self._host.stop(model.id)
            else:
                self._added |= {model.id: (entry, model) for entry, (model, _) in started}

    def pull(self, name: str) -> AsyncGenerator[PullProgress]:
        """Download a model of a hub, and serve it by this name. Leaving the iterator ends the download; the
        next one of the same model goes on from there. It raises CorralError."""
        served = self._id(name)
        if served is not None and served not in self._added:
            return _success()
        return self._make(_usable_id(name), {"source": {"repo": name}})

    def create(
        self, name: str, origin: str, changes: Mapping[str, Any]
    ) -> AsyncGenerator[PullProgress]:
        """Serve a model as another one, with changes of some sections of its entry. What is not served yet
        is downloaded. The iterator raises CorralError."""
        model_id, known = _usable_id(name), self._entry(origin)
        base = {"source": {"repo": origin}} if known is None else known
        return self._make(model_id, _change_entry(base, changes))

    async def copy(self, name: str, new_name: str) -> None:
        """Serve a model under another name, too. Raises CorralError."""
        if self._entry(name) is None:
            raise ModelNotFoundError(name)
        async for _ in self.create(new_name, name, {}):
            pass

    async def delete(self, name: str) -> None:
        """Serve an added model no more, and delete files that no other model has. Raises CorralError."""
        if self.cancel(name):
            return
        model_id = self._id(name)
        if model_id is None:
            raise ModelNotFoundError(name)
        if model_id not in self._added:
            raise PermissionDeniedError(
                f"The model {model_id!r} is part of the configuration. Remove it from `models` there."
            )
        async with self._changing:
            await asyncio.to_thread(self._kept.remove, model_id)
            await self._remove(model_id)
        await self._tell_ingresses()

    async def _remove(self, model_id: str) -> None:
        """Serve a model no more, and delete its files here unless another one has them."""
        _, model = self._added.pop(model_id)
        await self._stop(model_id)
        others = [*self._host.configured_models, *(other for _, other in self._added.values())]
        used = {source for other in others for source in _sources(other)}
        for source in set(_sources(model)) - used:
            await asyncio.to_thread(_delete, source, model)

    def pull_later(self, name: str) -> None:
        """Begin a download that nobody waits for. Raises CorralError."""
        model_id = _usable_id(name)
        if len(self._background) >= _MOST_WAITING:
            raise QueueFullError("Too many models are being downloaded.", 60)

        async def pull() -> None:
            try:
                async with aclosing(self.pull(name)) as steps:
                    async for step in steps:
                        self._steps[model_id] = step
            except (CorralError, asyncio.CancelledError) as error:
                self._steps[model_id] = PullProgress(str(error) or "cancelled")
                logger.error("The model %s could not be added: %s", model_id, error)
            finally:
                del self._background[model_id]

        if model_id not in self._background:
            self._background[model_id] = asyncio.create_task(pull())

    async def events(self) -> AsyncGenerator[dict[str, Any]]:
        """The events of llama-server's GET /models/sse: whatever changes, for an hour at most. Source:
        llama.cpp, tools/server/README.md, "Real-time events"."""
        may_use = request_context.current().may_use
        states, steps = self._states(), dict(self._steps)
        for _ in range(round(_EVENTS_S / _LOOK_EVERY_S)):
            await asyncio.sleep(_LOOK_EVERY_S)
            for name, step in self._steps.items():
                if step != steps.get(name) and may_use(name):
                    yield {"model": name, **_event(step, is_over=name not in self._background)}
            now = self._states()
            for name in states.keys() - now.keys():
                yield {"model": name, "event": "model_remove"}
            if now.keys() - states.keys():
                yield {"model": "*", "event": "models_reload"}
            for name, state in now.items():
                if state != states.get(name):
                    yield {"model": name, "event": "model_status", "data": {"status": state}}
            states, steps = now, dict(self._steps)

    def _states(self) -> dict[str, str]:
        return {
            name: "loaded" if model.engine.is_loaded else "unloaded"
            for name, model in usable(self._models).items()
        }

    def cancel(self, name: str) -> bool:
        """End a download that nobody waits for. Returns whether there is one."""
        pulling = self._background.get(model_id_of(name))
        if pulling is None:
            return False
        _usable_id(name)
        return pulling.cancel()

    # -- steps ------------------------------------------------------------------------------------

    def _id(self, name: str) -> str | None:
        """The id of the model that has this name itself; None if there is none."""
        named = {
            model_id: replace(model, aliases=[alias for alias in model.aliases if alias != "*"])
            for model_id, model in self._models.items()
        }
        try:
            return find(named, name).id
        except ModelNotFoundError:
            return None

    def _entry(self, name: str) -> Entry | None:
        model_id = self._id(name)
        if model_id is None:
            return None
        return self._added[model_id][0] if model_id in self._added else self._host.entry(model_id)

    async def _make(self, model_id: str, entry: Entry) -> AsyncGenerator[PullProgress]:
        yield PullProgress("pulling manifest")
        named = {**entry, "id": model_id, "keep_alive": KEEP_ALIVE}
        try:
            model = await self._host.resolve(named)
        except ConfigError as error:
            raise InvalidRequestError(_OF_CONFIGURATION.sub("", str(error)), "model") from None
        # The commit is kept: the next start asks nobody, and serves the same files.
        named["source"] = model.source.model_dump(mode="json", exclude_unset=True)
        for source in _sources(model):
            async with self._pulling, aclosing(_fetch(source, model)) as steps:
                async for step in steps:
                    yield step
        yield PullProgress("writing manifest")
        await self._add(named, model)
        yield PullProgress("success")

    async def _add(self, entry: Entry, model: ResolvedModel) -> None:
        """Serve a model, in the place of one of the same name that was added before."""
        model_id = model.id
        async with self._changing:
            if self._host.entry(model_id) is not None:
                raise InvalidRequestError(f"The configuration has a model {model_id!r}.", "model")
            if self._added.get(model_id, ({},))[0] == entry:
                return
            if model_id in self._added:
                del self._added[model_id]
                await self._stop(model_id)
            elif len(self._added) >= MOST_ADDED:
                raise InvalidRequestError(f"{MOST_ADDED} models were added already.", "model")
            handle = await self._host.start(entry, model)
            try:
                await self._registry.add([(model, handle)])
            except BaseException:
                await self._host.stop(model_id)
                raise
            self._added[model_id] = entry, model
            await asyncio.to_thread(self._kept.put, entry)
        await self._tell_ingresses()

    async def _stop(self, model_id: str) -> None:
        await self._registry.drop(model_id)
        await self._host.stop(model_id)


def _event(step: PullProgress, *, is_over: bool) -> dict[str, Any]:
    """The step of a download as llama-server tells it."""
    if not is_over:
        file = step.digest or step.status
        data = {file: {"done": step.completed, "total": step.total}} if step.total else {}
        return {"event": "download_progress", "data": data}
    if step.status == "success":
        return {"event": "download_finished", "data": {}}
    return {"event": "download_failed", "data": {"error": step.status}}


def model_id_of(name: str) -> str:
    """The id of a model that is added by a name: without a scheme, a revision, and Ollama's `:latest`."""
    shortened = name.removeprefix("https://").removeprefix("http://")
    return shortened.partition("@")[0].rstrip("/").removesuffix(":latest")


def _usable_id(name: str) -> str:
    """The id of a model that is added by a name, for a caller that may use it. Raises
    PermissionDeniedError."""
    model_id = model_id_of(name)
    request_context.current().check_model(model_id, name)
    return model_id


def _change_entry(entry: Entry, changes: Mapping[str, Any]) -> Entry:
    """The entry with some fields of its sections changed, and more items in its lists."""
    return dict(entry) | {
        name: [*entry.get(name, ()), *new]
        if isinstance(new, list)
        else {**entry.get(name, {}), **new}
        for name, new in changes.items()
    }


def _sources(model: ResolvedModel) -> list[ModelSource]:
    """The sources of a model that are downloaded."""
    adapters = (adapter.source for adapter in model.adapters)
    sources = (model.source, model.projector, model.draft, *adapters)
    return [source for source in sources if source and not source.builtin and not source.path]


def _delete(source: ModelSource, model: ResolvedModel) -> None:
    try:
        store.delete(store.remote_model(source, model.downloads), model.downloads)
    except (ConfigError, OSError) as error:
        logger.warning("The files of %s stay: %s", model.id, error)


async def _success() -> AsyncGenerator[PullProgress]:
    yield PullProgress("success")


async def _fetch(source: ModelSource, model: ResolvedModel) -> AsyncGenerator[PullProgress]:
    """Download a file, with its shards. Raises CorralError."""
    downloads, done, is_left = model.downloads, 0.0, False

    def report(stage: Stage) -> None:
        nonlocal done
        if is_left:
            raise ConfigError("Nobody waits for the download any more.")
        done = stage.done

    def step(remote: RemoteModel) -> PullProgress:
        file = remote.files[0]
        status = f"pulling {file.sha256[:12] if file.sha256 else file.name}"
        digest = f"sha256:{file.sha256}" if file.sha256 else None
        return PullProgress(status, digest, remote.n_bytes, round(done * remote.n_bytes))

    remote = await asyncio.to_thread(store.remote_model, source, downloads)
    fetching = asyncio.ensure_future(asyncio.to_thread(store.fetch, remote, downloads, report))
    fetching.add_done_callback(lambda _: fetching.cancelled() or fetching.exception())
    try:
        while not fetching.done():
            yield step(remote)
            await asyncio.wait([fetching], timeout=_TELL_EVERY_S)
        try:
            fetching.result()
        except ConfigError as error:
            raise InvalidRequestError(str(error), "model") from None
        yield step(remote)
    finally:
        is_left = True


def _not_managed() -> PermissionDeniedError:
    return PermissionDeniedError(
        "This server's models are those of its configuration. Operators may add others while it serves "
        "if `manage_models: true` is there."
    )


ModelControlArgument = Annotated[ModelControl, of_app("model_control", _not_managed)]
"""The argument of a route that adds or removes models, where operators may."""
