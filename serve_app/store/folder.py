"""The folder that downloaded models lie in: who uses which, and which go when there is no room.

Each model has a folder, and a lock; see `serve_app.locks`.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.locks import FolderLocks
from serve_app.store import download
from serve_app.store.remote import RemoteModel

_LOOK_EVERY_S = 0.3
_VOCABULARIES = "vocabulary"
"""The folder in a model's for what is left when it goes: a few megabytes."""
SPARE_BYTES = 2**29
_GIB = 2**30
logger = logging.getLogger("corral.store")


@dataclass(frozen=True, slots=True)
class ModelsFolder:
    """Downloaded models of this node. Processes share it; any thread may call."""

    path: Path
    max_bytes: int | None = None
    """Most bytes of all models together; None for what the disk has room for."""

    @property
    def names(self) -> Path:
        """Where listings of repositories are kept."""
        return self.path / ".names"

    def of(self, model: RemoteModel) -> Path:
        return self.path / model.folder

    def vocabularies(self, model: RemoteModel) -> Path:
        """The folder for its files without weights."""
        return self.of(model) / _VOCABULARIES

    def open(self, model: RemoteModel) -> bool:
        """Whether the model is here, whole. It stays until this process ends then."""

        def is_whole() -> bool:
            return all(download.is_whole(self.of(model), file) for file in model.files)

        return self._locks.share(model.folder, is_whole)

    @contextmanager
    def alone(self, model: RemoteModel) -> Iterator[bool]:
        """Whether nobody else uses or changes the model's folder now; nobody does then until the end."""
        with self._locks.alone(model.folder) as held:
            yield held is not None

    @contextmanager
    def reading(self, model: RemoteModel, on_wait: Callable[[], None]) -> Iterator[None]:
        """Alone with the model's vocabulary; waits as long as somebody else makes it."""
        while True:
            with self._locks.alone(f"{model.folder}.{_VOCABULARIES}") as held:
                if held is not None:
                    yield
                    return
            on_wait()
            time.sleep(_LOOK_EVERY_S)

    def make_room(self, model: RemoteModel) -> None:
        """Reserve what the model takes. Files that no process has open are deleted for it, the
        least recently used first. The caller is alone with the model. Raises ConfigError if it is
        not enough, and OSError."""
        folder = self.of(model)
        folder.mkdir(parents=True, exist_ok=True)
        with self._locks.alone(".room", wait=True):
            others = sorted(self._others(model), key=lambda one: self._locks.last_used(one.name))
            while True:
                lacking = self._lacking(model)
                if lacking <= 0:
                    break
                if not any(self._remove(other) for other in _taken(others)):
                    raise ConfigError(self._no_room(model, lacking))
            for file in model.files:
                if not download.is_whole(folder, file):
                    download.reserve(folder, file)

    def _lacking(self, model: RemoteModel) -> int:
        """Bytes that are too many if the model comes, beyond the bound or beyond the disk."""
        come = model.n_bytes - sum(download.n_present(self.of(model), file) for file in model.files)
        promised = sum(map(_promised, self.path.glob("*/*.part")))
        own = sum(map(_promised, self.of(model).glob("*.part")))
        lacking = come + SPARE_BYTES + promised - own - shutil.disk_usage(self.path).free
        if self.max_bytes is not None:
            others = sum(_n_bytes(other) for other in self._others(model))
            lacking = max(lacking, others + model.n_bytes - self.max_bytes)
        return lacking

    def _others(self, model: RemoteModel) -> list[Path]:
        return [
            path
            for path in self.path.iterdir()
            if path.is_dir() and not path.name.startswith(".") and path != self.of(model)
        ]

    def _remove(self, folder: Path) -> bool:
        """Whether that made room. Vocabularies stay."""
        with self._locks.alone(folder.name) as held:
            n_bytes = _n_bytes(folder)
            if held is None or not n_bytes:
                return False
            for path in _files(folder):
                path.unlink(missing_ok=True)
        logger.info("%s was removed to make room: %.1f GiB.", folder.name, n_bytes / _GIB)
        return True

    def _no_room(self, model: RemoteModel, lacking: int) -> str:
        bound = "" if self.max_bytes is None else f", bounded to {self.max_bytes / _GIB:.1f} GiB,"
        free = shutil.disk_usage(self.path).free
        return (
            f"{model.label} takes {model.n_bytes / _GIB:.2f} GiB: {lacking / _GIB:.2f} GiB more than there "
            f"is room for in {self.path}{bound} beside the models that are in use; its disk has "
            f"{free / _GIB:.2f} GiB left. Make room, or set downloads.folder or downloads.max_gib."
        )

    @property
    def _locks(self) -> FolderLocks:
        return FolderLocks(self.path / ".locks")


def _promised(part: Path) -> int:
    """Bytes that a file is still to get. Others may have removed or renamed it meanwhile."""
    try:
        status = part.stat()
    except FileNotFoundError:
        return 0
    return max(0, status.st_size - status.st_blocks * 512)


def _files(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if not path.is_dir()]
    return []


def _n_bytes(folder: Path) -> int:
    total = 0
    for path in _files(folder):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def _taken(paths: list[Path]) -> Iterator[Path]:
    """Each once, the first first, however often this is called."""
    while paths:
        yield paths.pop(0)
