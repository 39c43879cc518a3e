"""The folder that downloaded models lie in: who uses which, and which go when there is no room.

Each model has a folder, and a lock; see `serve_app.base.sharing.locks`. While it is downloaded, its files
are in another folder, whose name ends in `.part`.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from serve_app.base.errors import ConfigError
from serve_app.base.folders import GIB, PART, BoundedFolder, sync
from serve_app.store.remote import RemoteFile, RemoteModel

_VOCABULARIES = "vocabulary"
"""The folder in a model's for what is left when it goes: a few megabytes."""
_RESERVED = "reserved"
"""A file without content in a `.part` folder, as long as the model."""


class ModelsFolder(BoundedFolder):
    """Downloaded models of this node."""

    @property
    def listings(self) -> Path:
        """The folder of listings of repositories."""
        return self.path / ".names"

    def of(self, model: RemoteModel) -> Path:
        return self.path / model.folder

    def file(self, model: RemoteModel, file: RemoteFile) -> Path:
        """The place of a file of a model while others of it are still to come."""
        return self._part(model) / "files" / file.name

    def coming(self, model: RemoteModel) -> Path:
        """An empty folder for the file that comes now."""
        folder = self._part(model) / "coming"
        shutil.rmtree(folder, ignore_errors=True)  # a process was killed
        folder.mkdir(parents=True)
        return folder

    def vocabularies(self, model: RemoteModel) -> Path:
        """The folder for its files without weights."""
        return self.of(model) / _VOCABULARIES

    def open(self, model: RemoteModel) -> bool:
        """Whether the model is here, whole. It stays until this process ends then."""
        return self.locks.share(model.folder, lambda: self.is_whole(model))

    def is_whole(self, model: RemoteModel) -> bool:
        """Whether all files of the model are here, and were checked."""
        return all(_size(self.of(model) / file.name) == file.n_bytes for file in model.files)

    def has(self, model: RemoteModel, file: RemoteFile) -> bool:
        """Whether a file of the model is here, and was checked, though others may be still to come."""
        paths = self.of(model) / file.name, self.file(model, file)
        return any(_size(path) == file.n_bytes for path in paths)

    def n_present(self, model: RemoteModel) -> int:
        """Bytes of the model that are here, or have come of what is downloaded now."""
        here = model.n_bytes if self.is_whole(model) else _bytes_on_disk(self._part(model))
        return min(here, model.n_bytes)

    def alone(self, model: RemoteModel) -> AbstractContextManager[int | None]:
        """A lock: nobody else uses or changes the model's folder until the end. None if somebody does."""
        return self.locks.alone(model.folder)

    def alone_with_vocabulary(self, model: RemoteModel) -> AbstractContextManager[int | None]:
        """A lock: nobody else makes the model's files without weights until the end. Waits for who does."""
        return self.locks.alone(f"{model.folder}.{_VOCABULARIES}", wait=True)

    def make_room(self, model: RemoteModel) -> None:
        """Reserve what the model takes. Files that no process has open are deleted for it, the least
        recently used first. The caller is alone with the model. Raises ConfigError, and OSError."""
        part = self._part(model)
        self.coming(model)
        self.file(model, model.files[0]).parent.mkdir(exist_ok=True)
        with self.locks.alone(".room", wait=True):
            others = self.names() - {model.folder, part.name}
            lacking = self.free(others, lambda: self._lacking(model))
            if lacking > 0:
                raise ConfigError(self._no_room(model, lacking))
            with (part / _RESERVED).open("wb") as reserved:
                reserved.truncate(model.n_bytes)

    def finish(self, model: RemoteModel) -> None:
        """Give a model's files their names, as all of them have come. Raises OSError."""
        self.of(model).mkdir(exist_ok=True)
        for path in self.file(model, model.files[0]).parent.iterdir():
            path.replace(self.of(model) / path.name)
        sync(self.of(model))
        shutil.rmtree(self._part(model))

    def delete(self, model: RemoteModel) -> None:
        """Delete a model's files, and what has come of them, unless a process uses them."""
        self.remove(model.folder)
        self.remove(self._part(model).name)

    def _part(self, model: RemoteModel) -> Path:
        return self.path / f"{model.folder}{PART}"

    def _lacking(self, model: RemoteModel) -> int:
        n_new = model.n_bytes - _bytes_on_disk(self._part(model))
        for reserved in self.path.glob(f"*{PART}/{_RESERVED}"):
            if reserved.parent != self._part(model) and (n_bytes := _size(reserved)) is not None:
                n_new += max(0, n_bytes - _bytes_on_disk(reserved.parent))
        others = self.names() - {model.folder, self._part(model).name}
        return self.lacking(n_new, model.n_bytes, others)

    def _no_room(self, model: RemoteModel, lacking: int) -> str:
        bound = "" if self.max_bytes is None else f", bounded to {self.max_bytes / GIB:.1f} GiB,"
        free = shutil.disk_usage(self.path).free
        return (
            f"{model.label} takes {model.n_bytes / GIB:.2f} GiB: {lacking / GIB:.2f} GiB more than there "
            f"is room for in {self.path}{bound} beside the models that are in use; its disk has "
            f"{free / GIB:.2f} GiB left. Make room, or set downloads.folder or downloads.max_gib."
        )


def disk_error(folder: Path, error: OSError) -> ConfigError:
    """The meaning of an error while a file is written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(
            f"The disk of {folder} is full. Make room, or set downloads.folder to another disk. Files of "
            "the model that are whole stay for the next try."
        )
    return ConfigError(f"{folder} cannot be written: {error}")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _bytes_on_disk(folder: Path) -> int:
    """Bytes that the files below a folder take. Others may remove or rename some meanwhile."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(where, name).stat().st_blocks * 512
    return total
