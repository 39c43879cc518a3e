"""LoRA adapters that come and go while an application serves: what one ingress replica knows and does."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping

from serve_app.base.errors import (
    ConfigError,
    CorralError,
    EngineUnavailableError,
    InvalidRequestError,
)
from serve_app.base.values.adapters import AdapterUse
from serve_app.channel.handle import ReplicaHandle
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import AdapterConfig
from serve_app.server.model_registry import ServedModel
from serve_app.server.workers.pool import WorkerPool
from serve_app.store import models as store
from serve_app.store.shared_entries import LoadedAdapter, LoadedAdapters

logger = logging.getLogger("corral.ingress")

_LOAD_S = 600.0
"""A replica that has not loaded an adapter by then loads it when it is asked for."""
_TELL_S = 2.0


class AdapterControl:
    """Used in one ingress replica's event loop."""

    def __init__(
        self,
        models: dict[str, ServedModel],
        resolved: Mapping[str, ResolvedModel],
        workers: WorkerPool,
        all_loaded: LoadedAdapters,
        tell_ingresses: Callable[[], Awaitable[None]],
    ) -> None:
        """Changes of `models`, and what the workers are told of them, are made here."""
        self._models = models
        self._resolved = resolved
        self._workers = workers
        self._all_loaded = all_loaded
        self._tell_ingresses = tell_ingresses
        self._known: dict[str, tuple[LoadedAdapter, ...]] = {}

    async def look(self) -> None:
        """Serve what is loaded now. Raises nothing: Ray's head may be away for a moment."""
        try:
            loaded = {
                name: await asyncio.to_thread(self._all_loaded.read, name)
                for name in list(self._resolved)
            }
        except Exception as error:
            logger.warning("The list of loaded adapters could not be read: %r.", error)
            return
        if loaded == self._known or not (self._known or any(loaded.values())):
            return
        self._known = loaded
        self._workers.adapters = adapters = {
            name: number_adapters(self._resolved[name], loaded[name]) for name in loaded
        }
        for name, those in adapters.items():
            if name not in self._models:  # the model has gone meanwhile
                continue
            self._models[name] = dataclasses.replace(self._models[name], adapters=those)

    async def load(self, model_id: str, config: AdapterConfig, handle: ReplicaHandle) -> None:
        """Have it at all replicas behind the handle, of which one runs at least. Raises CorralError, and
        nobody has it then."""
        resolved = self._resolved[model_id]
        if config.id in {one.id for one in resolved.adapters}:
            raise InvalidRequestError(
                f"The configuration already has the adapter {config.id!r}.", "load"
            )
        config = await asyncio.to_thread(_pin, config, resolved)
        answers = await handle.ask_all("load_adapter", config, timeout_s=_LOAD_S)
        versions = {answer for answer in answers if isinstance(answer, str)}
        try:
            for answer in answers:
                if isinstance(answer, CorralError):
                    raise _request_error(answer)
            if not versions:
                raise EngineUnavailableError("No engine of this model answers.")
            if len(versions) > 1:
                raise InvalidRequestError("The nodes of the replicas have different files.", "load")
            (version,) = versions
            await asyncio.to_thread(self._all_loaded.add, model_id, config, version)
        except CorralError:
            in_use = {
                one.version for one in self._known.get(model_id, ()) if one.config.id == config.id
            }
            for version in versions - in_use:
                await handle.ask_all("unload_adapter", config.id, version, timeout_s=_TELL_S)
            raise
        await self._tell()

    async def unload(self, model_id: str, adapter_id: str, handle: ReplicaHandle) -> None:
        """Have it no more, nowhere: what runs with it goes on. Raises CorralError."""
        if adapter_id in {one.id for one in self._resolved[model_id].adapters}:
            raise InvalidRequestError(
                f"The adapter {adapter_id!r} is part of the configuration. Remove it there.",
                "unload",
            )
        gone = await asyncio.to_thread(self._all_loaded.remove, model_id, adapter_id)
        if gone is None:
            raise InvalidRequestError(f"There is no adapter {adapter_id!r}.", "unload")
        await self._tell()
        await handle.ask_all("unload_adapter", adapter_id, gone.version, timeout_s=_TELL_S)

    async def _tell(self) -> None:
        await self.look()
        await self._tell_ingresses()


def number_adapters(
    resolved: ResolvedModel, loaded: tuple[LoadedAdapter, ...] = ()
) -> dict[int, AdapterUse]:
    """A model's adapters by their numbers: those of the configuration are the first ones."""
    configured = dict(enumerate(resolved.adapter_uses))
    names = {adapter.id for adapter in configured.values()}
    later = {
        adapter.number + len(configured): adapter.use
        for adapter in loaded
        if adapter.config.id not in names
    }
    return configured | later


def _pin(config: AdapterConfig, resolved: ResolvedModel) -> AdapterConfig:
    """The adapter with a source that has the same bytes on every node. Raises InvalidRequestError."""
    try:
        source = store.pin_source(config.source, resolved.downloads)
    except ConfigError as error:
        raise _request_error(error) from error
    return config.model_copy(update={"source": source})


def _request_error(error: CorralError) -> CorralError:
    """A file that cannot be used is the request's mistake."""
    return InvalidRequestError(str(error), "load") if isinstance(error, ConfigError) else error
