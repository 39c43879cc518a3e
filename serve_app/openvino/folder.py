"""The folder that converted models lie in, with a bound: the least recently used go first."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.locks import FolderLocks

MODEL = "openvino_model.xml"
PART = ".part"
"""The end of the name of a folder that is not whole."""
_GIB = 2**30
_SPARE_BYTES = 2**29
logger = logging.getLogger("corral.engine")


@dataclass(frozen=True, slots=True)
class ConvertedModels:
    """Converted models of this node. Processes share it; any thread may call."""

    path: Path
    max_bytes: int | None = None
    """The most bytes of all models together; None for what the disk has room for."""

    def of(self, name: str) -> Path:
        """The model's file."""
        return self.path / name / MODEL

    def open(self, name: str) -> bool:
        """Whether the model is here. It stays until this process ends then."""
        return self._locks.share(name, self.of(name).is_file)

    @contextmanager
    def alone(self, name: str) -> Iterator[int | None]:
        """The lock's descriptor if nobody else uses or makes this model. Nobody does then until the end,
        and until a process that got it has ended."""
        with self._locks.alone(name) as held:
            yield held

    def make_room(self, name: str, n_bytes: int) -> Path:
        """An empty folder for a model of that size, which becomes the model's when it is renamed. Models
        that no process has open are deleted for it. Raises ConfigError if it is not enough, and OSError."""
        part = self.path / f"{name}{PART}"
        with self._locks.alone(".room", wait=True):
            shutil.rmtree(part, ignore_errors=True)
            others = sorted(self._others(name), key=self._locks.last_used)
            while (lacking := self._lacking(others, n_bytes)) > 0:
                if not any(self._remove(other) for other in _taken(others)):
                    raise ConfigError(
                        f"The model takes {n_bytes / _GIB:.2f} GiB when it is converted for OpenVINO: "
                        f"{lacking / _GIB:.2f} GiB more than there is room for in {self.path}, beside the "
                        "models that are in use. Make room, or set downloads.max_converted_gib."
                    )
            part.mkdir(parents=True)
        return part

    def _lacking(self, others: list[str], n_bytes: int) -> int:
        """Bytes that are too many, beyond the bound or beyond the disk."""
        lacking = n_bytes + _SPARE_BYTES - shutil.disk_usage(self.path).free
        if self.max_bytes is not None:
            present = sum(_n_bytes(self.path / one) for one in self._others(""))
            lacking = max(lacking, present + n_bytes - self.max_bytes)
        return lacking

    def _others(self, name: str) -> list[str]:
        return [
            path.name
            for path in self.path.iterdir()
            if path.is_dir() and not path.name.startswith(".") and path.name != name
        ]

    def _remove(self, name: str) -> bool:
        """Whether that made room."""
        with self._locks.alone(name.removesuffix(PART)) as held:
            folder = self.path / name
            if held is None or not folder.is_dir():
                return False
            n_bytes = _n_bytes(folder)
            # Without its first file it is no model, even if this process is killed meanwhile.
            (folder / MODEL).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        logger.info("%s was removed to make room: %.1f GiB.", name, n_bytes / _GIB)
        return True

    @property
    def _locks(self) -> FolderLocks:
        return FolderLocks(self.path / ".locks")


def finish(part: Path) -> None:
    """Give a folder the name of the model that is in it, whole and on the disk."""
    for path in [*part.iterdir(), part]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    part.rename(part.with_name(part.name.removesuffix(PART)))


def _n_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _taken(names: list[str]) -> Iterator[str]:
    """Each once, the first first, however often this is called."""
    while names:
        yield names.pop(0)
