"""Entries that all ingresses and replicas of an application know: adapters, added models, downloads.

Processes of Ray keep them with Ray's head, and they last as long as it does. Those of a local server keep
them in its folder (`keep_in`). Functions and methods block meanwhile, and raise errors of Ray or of the
file system, unless they say otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

from serve_app.base.errors import InvalidRequestError
from serve_app.base.progress import Report, Stage
from serve_app.base.values.adapters import AdapterUse
from serve_app.base.values.replicas import FetchingReplica
from serve_app.config.sources import AdapterConfig

_TELL_EVERY_S = 1.0
_STALE_S = 10.0
"""The seconds after which an entry that was not told anew is of a replica that is gone. Clocks of nodes
may differ by less."""
MOST_ADDED = 32
"""Models that may be added: each has a process, also while it is not loaded."""
MOST_ADAPTERS = 64

Entry = Mapping[str, Any]


class KeyValues(Protocol):
    """The values that processes share, by their keys. Any thread."""

    def list(self, prefix: str) -> Iterable[str]:
        """The keys that begin so."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        """Write a value, if there is none or it may be overwritten. Returns whether there was one."""

    def delete(self, key: str) -> None: ...


class FolderValues:
    """The KeyValues of processes on one machine: a file for each key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def list(self, prefix: str) -> Iterable[str]:
        paths = self._folder.iterdir()
        keys = (unquote(path.name) for path in paths if not path.name.startswith("."))
        return [key for key in keys if key.startswith(prefix)]

    def get(self, key: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._path(key).read_bytes()
        return None

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        path = self._path(key)
        existed = path.exists()
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as part:
            part.write(value)  # readers see all of it, or nothing
        try:
            if overwrite:
                os.replace(part.name, path)  # noqa: PTH105
                return existed
            try:
                os.link(part.name, path)
            except FileExistsError:
                return True
            return False
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part.name)  # noqa: PTH108

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")


_values: KeyValues | None = None


def keep_in(folder: Path) -> None:
    """Have this process share its entries with others that name the same folder. Call it once, at the
    start of a process."""
    global _values
    _values = FolderValues(folder)


def share_by(values: KeyValues) -> None:
    """Have this process share its entries by these values. Call it once, at the start of a process."""
    global _values
    _values = values


def shared_values() -> KeyValues:
    """The values that this process shares, as `keep_in` or `share_by` has said."""
    if _values is None:
        raise RuntimeError("Nothing says where this process shares its entries.")
    return _values


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A LoRA adapter that was loaded while serving."""

    number: int
    """Position among the adapters that the model ever had, from 0 on."""
    config: AdapterConfig
    version: str

    @property
    def use(self) -> AdapterUse:
        return AdapterUse(self.config.id, self.config.scale, self.version)


class LoadedAdapters:
    """The adapters of all replicas of an application. A replica that comes later finds them.

    Each model's are entries with numbers from 0 on. One that is gone leaves an empty entry, so no number is
    used again.
    """

    def __init__(self, app: str) -> None:
        self._prefix = f"adapters/{app}/"

    def read(self, model_id: str) -> tuple[LoadedAdapter, ...]:
        """A model's adapters, by their numbers."""
        entries = _entries(shared_values(), self._of(model_id))
        loaded = (
            LoadedAdapter(int(key), AdapterConfig.model_validate(entry["config"]), entry["version"])
            for key, entry in entries.items()
            if entry
        )
        return tuple(sorted(loaded, key=lambda adapter: adapter.number))

    def add(self, model_id: str, config: AdapterConfig, version: str) -> LoadedAdapter:
        """Have one more adapter, for all. Raises InvalidRequestError for a taken name, or too many."""
        self._check_room(model_id, config.id)
        content = {"config": config.model_dump(mode="json", exclude_unset=True), "version": version}
        number = 0
        while _put(shared_values(), f"{self._of(model_id)}{number}", content, overwrite=False):
            number += 1  # it is taken, maybe since a moment ago
        first = next(loaded for loaded in self.read(model_id) if loaded.config.id == config.id)
        if first.number != number:
            self._empty(model_id, number)
            raise _taken_error(config.id)
        return first

    def remove(self, model_id: str, adapter_id: str) -> LoadedAdapter | None:
        """Have an adapter no more; None if there is none of that name."""
        for loaded in self.read(model_id):
            if loaded.config.id == adapter_id:
                self._empty(model_id, loaded.number)
                return loaded
        return None

    def _empty(self, model_id: str, number: int) -> None:
        _put(shared_values(), f"{self._of(model_id)}{number}", {})

    def _of(self, model_id: str) -> str:
        return f"{self._prefix}{model_id.replace('/', '%')}/"

    def _check_room(self, model_id: str, adapter_id: str) -> None:
        adapters = self.read(model_id)
        if any(loaded.config.id == adapter_id for loaded in adapters):
            raise _taken_error(adapter_id)
        if len(adapters) >= MOST_ADAPTERS:
            raise InvalidRequestError(f"There are {MOST_ADAPTERS} loaded adapters already.", "load")


def _taken_error(adapter_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"There already is an adapter {adapter_id!r}. Unload it first.", "load"
    )


class AddedModels:
    """The models that operators have added while serving, as entries of `models`. They lie in a folder of
    their own beside the downloaded models, so that the next server has them, too."""

    def __init__(self, folder: Path, app: str | None = None) -> None:
        """All ingresses of the application of that name have the same entries, and their folders follow."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = FolderValues(folder)
        self._shared = None if app is None else f"added/{app}/"

    @property
    def are_shared(self) -> bool:
        """Whether other ingresses may change them."""
        return self._shared is not None

    def read(self) -> dict[str, Entry]:
        """The entries by their ids."""
        kept = _entries(self._folder, "")
        if self._shared is None:
            return kept
        if not shared_values().put(self._shared, b"", overwrite=False):
            for entry in kept.values():  # this is the application's first ingress
                self.put(entry)
        entries = _entries(shared_values(), self._shared)
        for model_id in kept.keys() - entries.keys():
            self._folder.delete(model_id)
        for model_id, entry in entries.items():
            if kept.get(model_id) != entry:
                _put(self._folder, model_id, entry)
        return entries

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace the one with its id."""
        if self._shared is not None:
            _put(shared_values(), self._shared + entry["id"], entry)
        _put(self._folder, entry["id"], entry)

    def remove(self, model_id: str) -> None:
        if self._shared is not None:
            shared_values().delete(self._shared + model_id)
        self._folder.delete(model_id)


def _put(values: KeyValues, key: str, entry: Entry, *, overwrite: bool = True) -> bool:
    """Write an entry. Returns whether there was one."""
    return values.put(key, json.dumps(entry).encode(), overwrite=overwrite)


def _entries(values: KeyValues, prefix: str) -> dict[str, Entry]:
    read = {key.removeprefix(prefix): values.get(key) for key in sorted(values.list(prefix))}
    return {key: json.loads(value) for key, value in read.items() if key and value}


_ADDED = ".added."


def added_application(app: str, model_id: str) -> str:
    """The name of the Serve application that has the engines of a model which was added to that one."""
    return f"{app}{_ADDED}{model_id}"


def whole_application(name: str) -> str:
    """The name of the application that an engine's Serve application is a part of."""
    return name.partition(_ADDED)[0]


@asynccontextmanager
async def publish_progress(
    app: str, deployment: str, replica_id: str, node_id: str
) -> AsyncIterator[Report]:
    """Let everybody know, every second until the end of the block, how far this replica is with its
    model. No replica answers before it has one. Raises nothing of Ray's."""
    key = _fetching(app, deployment) + replica_id
    latest: Stage | None = None
    enough = asyncio.Event()

    def take(stage: Stage) -> None:
        nonlocal latest
        latest = stage

    async def publish() -> None:
        while not enough.is_set():
            if latest is not None:
                figures = latest.name, latest.done, latest.limit_s
                replica = FetchingReplica(replica_id, node_id, *figures)
                entry = {"at": time.time(), "replica": asdict(replica)}
                with suppress(Exception):  # Ray's head is away for a moment
                    await asyncio.to_thread(_put, shared_values(), key, entry)
            with suppress(TimeoutError):
                async with asyncio.timeout(_TELL_EVERY_S):
                    await enough.wait()

    publishing = asyncio.create_task(publish())
    try:
        yield take
    finally:
        enough.set()
        await publishing
        with suppress(Exception):
            await asyncio.to_thread(shared_values().delete, key)


def fetching_replicas(app: str, deployment: str) -> tuple[FetchingReplica, ...]:
    """The replicas of a deployment that fetch their model now."""
    entries = _entries(shared_values(), _fetching(app, deployment))
    return tuple(
        FetchingReplica(**entry["replica"])
        for entry in entries.values()
        if time.time() - entry["at"] < _STALE_S
    )


def _fetching(app: str, deployment: str) -> str:
    return f"fetching/{app}/{deployment}/"
