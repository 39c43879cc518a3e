"""The folder that downloaded models lie in: who uses which, and which go when there is no room.

Each model has a folder, and a lock; see `serve_app.locks`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.folders import GIB, BoundedFolder
from serve_app.store import download
from serve_app.store.remote import RemoteModel

_LOOK_EVERY_S = 0.3
_VOCABULARIES = "vocabulary"
"""The folder in a model's for what is left when it goes: a few megabytes."""


class ModelsFolder(BoundedFolder):
    """Downloaded models of this node."""

    @property
    def listings(self) -> Path:
        """Where listings of repositories are kept."""
        return self.path / ".names"

    def of(self, model: RemoteModel) -> Path:
        return self.path / model.folder

    def vocabularies(self, model: RemoteModel) -> Path:
        """The folder for its files without weights."""
        return self.of(model) / _VOCABULARIES

    def open(self, model: RemoteModel) -> bool:
        """Whether the model is here, whole. It stays until this process ends then."""
        return self.locks.share(model.folder, lambda: self.is_whole(model))

    def is_whole(self, model: RemoteModel) -> bool:
        """Whether all files of the model are here, and were checked."""
        return all(download.is_whole(self.of(model), file) for file in model.files)

    @contextmanager
    def alone(self, model: RemoteModel) -> Iterator[bool]:
        """Whether nobody else uses or changes the model's folder now; nobody does then until the end."""
        with self.locks.alone(model.folder) as held:
            yield held is not None

    @contextmanager
    def reading(self, model: RemoteModel, on_wait: Callable[[], None]) -> Iterator[None]:
        """Alone with the model's vocabulary; waits as long as somebody else makes it."""
        while True:
            with self.locks.alone(f"{model.folder}.{_VOCABULARIES}") as held:
                if held is not None:
                    yield
                    return
            on_wait()
            time.sleep(_LOOK_EVERY_S)

    def make_room(self, model: RemoteModel) -> None:
        """Reserve what the model takes. Files that no process has open are deleted for it, the least
        recently used first. The caller is alone with the model. Raises ConfigError, and OSError."""
        folder = self.of(model)
        folder.mkdir(parents=True, exist_ok=True)
        with self.locks.alone(".room", wait=True):
            lacking = self.free(self.names() - {model.folder}, lambda: self._lacking(model))
            if lacking > 0:
                raise ConfigError(self._no_room(model, lacking))
            for file in model.files:
                if not download.is_whole(folder, file):
                    download.reserve(folder, file)

    def _lacking(self, model: RemoteModel) -> int:
        come = model.n_bytes - sum(download.n_present(self.of(model), file) for file in model.files)
        promised = sum(map(_promised, self.path.glob("*/*.part")))
        own = sum(map(_promised, self.of(model).glob("*.part")))
        others = self.names() - {model.folder}
        return self.lacking(come + promised - own, model.n_bytes, others)

    def _no_room(self, model: RemoteModel, lacking: int) -> str:
        bound = "" if self.max_bytes is None else f", bounded to {self.max_bytes / GIB:.1f} GiB,"
        free = shutil.disk_usage(self.path).free
        return (
            f"{model.label} takes {model.n_bytes / GIB:.2f} GiB: {lacking / GIB:.2f} GiB more than there "
            f"is room for in {self.path}{bound} beside the models that are in use; its disk has "
            f"{free / GIB:.2f} GiB left. Make room, or set downloads.folder or downloads.max_gib."
        )


def _promised(part: Path) -> int:
    """Bytes that a file is still to get. Others may have removed or renamed it meanwhile."""
    try:
        status = part.stat()
    except FileNotFoundError:
        return 0
    return max(0, status.st_size - status.st_blocks * 512)
