"""Saves slots to files and restores them, when a client asks for it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve_app.engine.core.command_queue import Command
from serve_app.engine.kv_cache import state_format
from serve_app.engine.kv_cache.manager import KVCacheManager
from serve_app.engine.options import EngineOptions
from serve_app.errors import (
    CorralError,
    InvalidRequestError,
    NotSupportedError,
    StorageFullError,
)
from serve_app.types import SlotAction

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class SlotFiles:
    """The files of one folder. Any thread but the decoder's; every call waits for it, and for the disk.

    A file is good only for the model, cache formats and version of llama.cpp that `state_key` stands for.
    `run_between_steps` gives a command to the decoder thread. Raises InvalidRequestError for what cannot be
    done, StorageFullError for what the folder may not hold, and EngineUnavailableError while the slot is
    busy."""

    def __init__(
        self, options: EngineOptions, state_key: bytes, run_between_steps: Callable[[Command], None]
    ) -> None:
        self._folder = options.slot_folder
        self._max_bytes = options.slot_folder_max_bytes
        self._key = state_format.key_of(state_key)
        self._run_between_steps = run_between_steps

    def act(self, action: str, slot_id: int, name: str) -> SlotAction:
        """`save`, `restore` or `erase`."""
        if action == "erase":
            return self.erase(slot_id)
        return (self.save if action == "save" else self.restore)(slot_id, name)

    def save(self, slot_id: int, name: str) -> SlotAction:
        """Write what an idle slot has."""
        path = self._path(name)
        began = time.monotonic()
        prefix = self._run(lambda cache: cache.save(slot_id))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone(path.parent):
                self._check_room(path, state_format.size_of(prefix))
                n_bytes = state_format.write(path, self._key, prefix)
        except OSError as error:
            raise CorralError(f"The slot cannot be written: {error.strerror}.") from error
        return SlotAction(slot_id, len(prefix.tokens), n_bytes, time.monotonic() - began)

    def restore(self, slot_id: int, name: str) -> SlotAction:
        """Fill an idle slot from a file."""
        path = self._path(name)
        began = time.monotonic()
        try:
            size = path.stat().st_size
            prefix = state_format.read(path, self._key, size)
        except OSError as error:
            message = f"The file {name!r} cannot be read: {error.strerror}."
            raise InvalidRequestError(message, "filename") from error
        except state_format.RefusedFileError as error:
            message = f"The file {name!r} cannot be used: {error}."
            raise InvalidRequestError(message, "filename") from error
        assert prefix is not None  # its state is smaller than the file
        self._run(lambda cache: cache.restore(slot_id, prefix))
        return SlotAction(slot_id, len(prefix.tokens), size, time.monotonic() - began)

    def erase(self, slot_id: int) -> SlotAction:
        """Empty an idle slot."""
        self._check_allowed()
        began = time.monotonic()
        n_tokens = self._run(lambda cache: cache.erase(slot_id))
        return SlotAction(slot_id, n_tokens, 0, time.monotonic() - began)

    def _run(self, run: Callable[[KVCacheManager], Any]) -> Any:
        command = Command(run)
        self._run_between_steps(command)
        return command.future.result()

    def _check_allowed(self) -> Path:
        if self._folder is None:
            raise NotSupportedError(
                "Slots cannot be saved, restored or erased here: engine.slot_folder is not set.",
                "action",
            )
        return self._folder

    def _check_room(self, path: Path, n_bytes: int) -> None:
        """Raises StorageFullError if this file is more than the folder may hold, or the disk can."""
        others = [
            entry for entry in os.scandir(path.parent) if entry.is_file(follow_symlinks=False)
        ]
        taken = sum(entry.stat(follow_symlinks=False).st_size for entry in others)
        replaced = path.stat().st_size if path.is_file() else 0
        room = self._max_bytes - (taken - replaced)
        free = shutil.disk_usage(
            path.parent
        ).free  # the old file is there until the new one is whole
        if n_bytes > room:
            raise StorageFullError(
                f"The slot takes {n_bytes} bytes, and the folder has room for {max(0, room)} of the "
                f"{self._max_bytes} that engine.slot_folder_max_mib allows: delete files, or allow more."
            )
        if n_bytes > free:
            raise StorageFullError(f"The slot takes {n_bytes} bytes; the disk has {free} left.")

    def _path(self, name: str) -> Path:
        folder = self._check_allowed()
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                "filename: up to 128 letters, digits, '-', '_' and '.', without a '.' in front.",
                "filename",
            )
        return folder / name


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process of this machine at a time. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
