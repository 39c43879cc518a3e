"""A replica's files on its node, and the LoRA adapters that come and go while it serves."""

from __future__ import annotations

import asyncio
import logging
from asyncio import sleep
from collections import defaultdict
from pathlib import Path

from serve_app.base.errors import ConfigError, CorralError, InvalidRequestError
from serve_app.base.progress import Report, Stage, nowhere
from serve_app.base.values.adapters import Adapters, AdapterUse
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import AdapterConfig, DownloadsConfig, ModelSource
from serve_app.engine import Engine
from serve_app.kernels.llama.context import adapter_fingerprint
from serve_app.store.models import locate
from serve_app.store.shared_entries import LoadedAdapter, LoadedAdapters


class Files:
    """Finds files. Used in a replica's event loop."""

    def __init__(self, downloads: DownloadsConfig, report: Report = nowhere) -> None:
        """`report` is told how far downloads are."""
        self._downloads, self._report = downloads, report
        self.n_bytes = 0
        """Bytes that were downloaded for this replica."""

    async def find(self, source: ModelSource) -> Path:
        """The file, on this node. Raises ConfigError."""
        last = Stage("downloading")

        def take(stage: Stage) -> None:
            nonlocal last
            last = stage
            self._report(stage)

        path = await asyncio.to_thread(locate, source, self._downloads, take)
        self.n_bytes += last.n_bytes
        return path


logger = logging.getLogger("corral.replica")

_RETRY_S = 1.0
"""Adapters that requests still use are freed later: it is tried as often."""
_VERSION_BYTES = 8


class ReplicaAdapters:
    """A replica's loaded adapters. Used in its event loop."""

    def __init__(self, model: ResolvedModel, engine: Engine, all_loaded: LoadedAdapters) -> None:
        self._model, self._files = model, Files(model.downloads)
        self._engine = engine
        self._all_loaded = all_loaded
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._freeing: set[asyncio.Task[None]] = set()

    async def catch_up(self) -> None:
        """Load what others have. Adapters that cannot be loaded are left out, with a line in the log."""
        try:
            found = await asyncio.to_thread(self._all_loaded.read, self._model.id)
            for one in found:
                await self._load(one.config, one.use)
        except Exception as error:
            logger.warning("Adapters that others have are not loaded: %r.", error)

    async def have(self, adapters: Adapters) -> None:
        """Load what is missing of those that a request asks for, as others have it. Raises CorralError."""
        for wanted in adapters:
            if wanted.version and not self._has(wanted):
                found = await self._find(wanted)
                await self._load(found.config, found.use)

    async def load(self, config: AdapterConfig) -> str:
        """Have one more; returns its version. Raises CorralError."""
        path = await self._files.find(config.source)
        version = await asyncio.to_thread(_adapter_version, path)
        await self._load(config, AdapterUse(config.id, config.scale, version))
        return version

    def unload(self, adapter_id: str, version: str) -> None:
        """Refuse new requests with it, and free it when those that use it have ended."""
        key = AdapterUse(adapter_id, 1.0, version).key
        self._engine.adapters.hide(key)
        task = asyncio.create_task(self._free(key))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    def _has(self, adapter: AdapterUse) -> bool:
        try:
            self._engine.adapters.check((adapter,))
        except InvalidRequestError:
            return False
        return True

    async def _find(self, adapter: AdapterUse) -> LoadedAdapter:
        found = await asyncio.to_thread(self._all_loaded.read, self._model.id)
        for loaded in found:
            if loaded.use.key == adapter.key:
                return loaded
        raise InvalidRequestError(f"The adapter {adapter.id!r} was unloaded.", "model")

    async def _load(self, config: AdapterConfig, adapter: AdapterUse) -> None:
        async with self._changing[adapter.key]:
            if self._has(adapter):
                return
            path = await self._files.find(config.source)
            if await asyncio.to_thread(_adapter_version, path) != adapter.version:
                raise ConfigError(f"The adapter {config.id!r} is another file on this node.")
            await asyncio.to_thread(self._engine.adapters.load, adapter.key, path)
            logger.info("The adapter %s of %s is loaded.", config.id, self._model.id)

    async def _free(self, key: str) -> None:
        """Free the adapter as soon as nobody uses it, unless it was loaded again."""
        try:
            while True:
                await sleep(_RETRY_S)
                async with self._changing[key]:
                    if not self._engine.adapters.is_hidden(key):
                        return
                    if await asyncio.to_thread(self._engine.adapters.free, key):
                        logger.info("The adapter %s of %s is unloaded.", key, self._model.id)
                        return
        except CorralError as error:  # the engine is closed, or broken
            logger.info("The adapter %s is not unloaded: %s", key, error)


def _adapter_version(path: Path) -> str:
    return adapter_fingerprint(path)[:_VERSION_BYTES].hex()
