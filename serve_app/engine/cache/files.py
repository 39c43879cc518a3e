"""The files of prefixes: their format, the disk tier, and the files that clients have slots saved to.

A file begins with what `_FIELDS` names, a checksum of all the rest, the cache group, the tokens and the
state. Then comes what `_CHECKPOINT` names of each checkpoint, and their states. The file is checked before
any of it is used: llama.cpp believes what a state says.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import (
    ConfigError,
    CorralError,
    InvalidRequestError,
    NotSupportedError,
    StorageFullError,
)
from serve_app.base.formats import State
from serve_app.base.values.replicas import SlotAction
from serve_app.engine.cache.contents import Checkpoint, StoredPrefix
from serve_app.engine.cache.packing import TOKEN_BYTES, pack, token_array
from serve_app.engine.core.command_queue import RunCommand

UNFINISHED = ".unfinished"
"""How names of files end that are being written."""
KEY_BYTES = 32

_MAGIC = b"CorralPx"
_VERSION = 3
# Magic, version, fingerprint, tokens, bytes of state, of group, number of checkpoints, their bytes.
_FIELDS = struct.Struct("<8sI32sIQIIQ")
_CHECKPOINT = struct.Struct("<IQ")  # tokens, bytes of state
_DIGEST_BYTES = 32

logger = logging.getLogger("corral.engine")

# A file that nobody has written to for so long is left from a process that died.
_ABANDONED_S = 3600.0
MOST_BYTES = 2**32
"""The most bytes of all saved slots in a folder."""
# Prefixes that wait for the disk, tens of MB each; one more is being written.
_MAX_QUEUED = 4
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class RefusedFileError(Exception):
    """A file must not be used; the message says why."""


def key_of(fingerprint: bytes) -> bytes:
    """The mark of a file: a hash of all that its state depends on."""
    return blake2b(fingerprint, digest_size=KEY_BYTES).digest()


def read_prefix(path: Path, key: bytes, room_bytes: int) -> StoredPrefix | None:
    """The prefix in a file; None if its state is larger. Raises RefusedFileError and OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise RefusedFileError("it is not a file")
    with path.open("rb") as file:
        fields, checksum = file.read(_FIELDS.size), file.read(_DIGEST_BYTES)
        if len(checksum) < _DIGEST_BYTES or not fields.startswith(_MAGIC):
            raise RefusedFileError("it is not a stored prefix, or cut off in its header")
        _, version, found_key, n_tokens, n_state, n_group, n_marks, n_states = _FIELDS.unpack(
            fields
        )
        if version != _VERSION:
            raise RefusedFileError(f"it is of version {version}, this program reads {_VERSION}")
        if found_key != key:
            raise RefusedFileError("it is of another model, context or version of llama.cpp")
        n_before = _FIELDS.size + _DIGEST_BYTES + n_group + n_tokens * TOKEN_BYTES
        n_bytes = n_before + n_state + n_marks * _CHECKPOINT.size + n_states
        if status.st_size != n_bytes:
            raise RefusedFileError(f"it has {status.st_size} bytes, its header says {n_bytes}")
        if n_state + n_states > room_bytes:
            return None
        group, tokens = file.read(n_group), file.read(n_tokens * TOKEN_BYTES)
        state, table = file.read(n_state), file.read(n_marks * _CHECKPOINT.size)
        states = file.read(n_states)
    if _checksum(fields, group, tokens, state, table, states) != checksum:
        raise RefusedFileError("its checksum is wrong")
    marks = _checkpoints(table, memoryview(states), n_tokens)
    return StoredPrefix(token_array(tokens), state, group.decode(), marks)


def _checkpoints(table: bytes, states: memoryview, n_tokens: int) -> tuple[Checkpoint, ...]:
    """Reads a file's checkpoints. Raises RefusedFileError if they are none of so many tokens."""
    marks, at = list[Checkpoint](), 0
    for n, size in _CHECKPOINT.iter_unpack(table):
        marks.append(Checkpoint(n, bytes(states[at : at + size])))
        at += size
    lengths = [0, *(one.n_tokens for one in marks), n_tokens + 1]
    if at != len(states) or any(n >= longer for n, longer in pairwise(lengths)):
        raise RefusedFileError("its checkpoints are not of its tokens")
    return tuple(marks)


def size_of(prefix: StoredPrefix) -> int:
    n_group, n_tokens = len(prefix.group.encode()), len(prefix.tokens)
    n_before = _FIELDS.size + _DIGEST_BYTES + n_group + n_tokens * TOKEN_BYTES
    return n_before + prefix.n_bytes + len(prefix.checkpoints) * _CHECKPOINT.size


def write(path: Path, key: bytes, prefix: StoredPrefix) -> int:
    """Make a file, whole or not at all, that only the owner can read; returns its bytes. Raises OSError."""
    group, tokens, marks = prefix.group.encode(), pack(prefix.tokens), prefix.checkpoints
    n_states = prefix.n_bytes - len(prefix.state)
    sizes = (len(prefix.tokens), len(prefix.state), len(group), len(marks), n_states)
    fields = _FIELDS.pack(_MAGIC, _VERSION, key, *sizes)
    table = b"".join(_CHECKPOINT.pack(one.n_tokens, len(one.state)) for one in marks)
    body = (group, tokens, prefix.state, table, *(one.state for one in marks))
    checksum = _checksum(fields, *body)
    descriptor, unfinished = tempfile.mkstemp(UNFINISHED, dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((fields, checksum, *body))
            file.flush()
            os.fsync(descriptor)
            n_bytes = file.tell()
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return n_bytes


def _checksum(*parts: State) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


class DiskTier:
    """The copies of one model's prefixes, in a folder of their own within `folder`.

    `fingerprint` is all that a state depends on: the model, the context's parameters, llama.cpp's version.
    Several models may share `folder`, and several replicas of one model: each file is whole, and good for
    all of them. It says which cache group it is for. A prefix that one of them discards is gone from the
    disk for all, until they add it again. Nobody but the owner can read the files: they hold what users
    wrote.

    One thread at a time may call, the decoder thread: `load` first, `close` last. Only `load` and
    `close` wait for the disk; the rest is done in order by a thread of this object's own. Raises
    ConfigError if the folder cannot be made, or made private.
    """

    def __init__(self, folder: Path, fingerprint: bytes) -> None:
        self._key = key_of(fingerprint)
        self._folder = folder / self._key[:16].hex()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"Prefixes cannot be kept in {folder}: {error}") from error
        # By file name: what is to be there, None for nothing. Both threads use it, each operation
        # is atomic; the writer takes out what is there by then, so that the last call counts.
        self._pending: dict[str, StoredPrefix | None] = {}
        self._intact: set[str] = set()  # names that were read or written here; the writer's
        self._logged: set[object] = set()  # kinds of errors that were logged; the writer's
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="corral-disk-tier")

    def load(self, budget_bytes: int) -> list[StoredPrefix]:
        """The prefixes used last whose states fit into `budget_bytes`, the least recently used first.

        Older ones are removed: replicas that are gone would leave theirs for ever. A file that is
        damaged, foreign or unreadable is left alone, with a line in the log. Raises OSError only if
        the folder cannot be listed.
        """
        found: list[StoredPrefix] = []
        for path in self._newest_first():
            try:
                prefix = self._read(path, budget_bytes)
                if prefix is None:
                    path.unlink()
                    continue
            except FileNotFoundError:
                continue  # another replica discarded it just now
            except (OSError, RefusedFileError) as error:
                logger.warning("The stored prefix %s is not loaded: %s", path, error)
                continue
            budget_bytes -= prefix.n_bytes
            self._intact.add(path.name)
            found.append(prefix)
        return found[::-1]

    def add(self, prefix: StoredPrefix) -> None:
        """Have it on disk soon, as the most recently used; if it is there already, that is all that
        changes. With too much to write already, it is left out, with a line in the log."""
        name = self._name(prefix)
        pending = list(self._pending.values())
        n_queued = len(pending) - pending.count(None)
        if n_queued >= _MAX_QUEUED and self._pending.get(name) is None:
            logger.warning("A prefix is not written: %d others wait for the disk.", n_queued)
        else:
            self._enqueue(name, prefix)

    def discard(self, prefix: StoredPrefix) -> None:
        """Have it on disk no more; if it was not written yet, it never is. Idempotent."""
        self._enqueue(self._name(prefix), None)

    def close(self) -> None:
        """Wait until everything is on disk. Idempotent; nothing may be added or discarded after."""
        self._writer.shutdown()

    def _enqueue(self, name: str, prefix: StoredPrefix | None) -> None:
        self._pending[name] = prefix
        self._writer.submit(self._apply, name)

    def _name(self, prefix: StoredPrefix) -> str:
        """The name of the prefix's file: one for each cache group that has these tokens."""
        group = blake2b(prefix.group.encode()).digest()  # of one size, or tokens could pass for it
        told = self._key + group + pack(prefix.tokens)
        return blake2b(told, digest_size=16).hexdigest() + ".prefix"

    def _newest_first(self) -> list[Path]:
        """All files but unfinished ones; of those, remove what is abandoned."""
        aged: list[tuple[int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another replica may be faster
                modified_ns = path.stat().st_mtime_ns
                if path.suffix != UNFINISHED:
                    aged.append((modified_ns, path))
                elif time.time() - modified_ns / 1e9 > _ABANDONED_S:
                    path.unlink()
        return [path for _, path in sorted(aged, reverse=True)]

    def _read(self, path: Path, room_bytes: int) -> StoredPrefix | None:
        prefix = read_prefix(path, self._key, room_bytes)
        if prefix is not None and path.name != self._name(prefix):
            raise RefusedFileError("it is not under its own name")
        return prefix

    # -- writer thread ----------------------------------------------------------------------------

    def _apply(self, name: str) -> None:
        """Write or remove one file as was asked last, unless an earlier call has; never raises."""
        if name not in self._pending:
            return
        prefix = self._pending.pop(name)
        try:
            if prefix is None:
                self._intact.discard(name)
                (self._folder / name).unlink(missing_ok=True)
            elif not self._touch(name):
                self._write(name, prefix)
        except Exception as error:
            kind = error.errno if isinstance(error, OSError) else type(error)
            if kind not in self._logged:
                self._logged.add(kind)
                logger.error("Prefixes in %s are not kept up to date: %r", self._folder, error)

    def _touch(self, name: str) -> bool:
        """Make a file the most recently used; False if it has to be written."""
        with contextlib.suppress(FileNotFoundError):  # another replica discarded it
            if name in self._intact:
                os.utime(self._folder / name)
                return True
        return False

    def _write(self, name: str, prefix: StoredPrefix) -> None:
        write(self._folder / name, self._key, prefix)
        self._intact.add(name)


class SlotFiles:
    """The files of one folder. Any thread but the decoder's; every call waits for it, and for the disk.

    A file is good only for the model, cache formats and version of llama.cpp that `state_key` stands for.
    Raises InvalidRequestError for what cannot be done, StorageFullError for what the folder may not hold,
    and EngineUnavailableError while the slot is busy."""

    def __init__(self, options: EngineOptions, state_key: bytes, run: RunCommand) -> None:
        self._folder = options.slot_folder
        self._key = key_of(state_key)
        self._run = run

    def act(self, action: str, slot_id: int, name: str) -> SlotAction:
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
                self._check_room(path, size_of(prefix))
                n_bytes = write(path, self._key, prefix)
        except OSError as error:
            raise CorralError(f"The slot cannot be written: {error.strerror}.") from error
        return SlotAction(slot_id, len(prefix.tokens), n_bytes, time.monotonic() - began)

    def restore(self, slot_id: int, name: str) -> SlotAction:
        """Fill an idle slot from a file."""
        path = self._path(name)
        began = time.monotonic()
        try:
            size = path.stat().st_size
            prefix = read_prefix(path, self._key, size)
        except OSError as error:
            message = f"The file {name!r} cannot be read: {error.strerror}."
            raise InvalidRequestError(message, "filename") from error
        except RefusedFileError as error:
            message = f"The file {name!r} cannot be used: {error}."
            raise InvalidRequestError(message, "filename") from error
        assert prefix is not None  # its state is smaller than the file
        self._run(lambda cache: cache.restore(slot_id, prefix))
        return SlotAction(slot_id, len(prefix.tokens), size, time.monotonic() - began)

    def erase(self, slot_id: int) -> SlotAction:
        self._check_allowed()
        began = time.monotonic()
        n_tokens = self._run(lambda cache: cache.erase(slot_id))
        return SlotAction(slot_id, n_tokens, 0, time.monotonic() - began)

    def _check_allowed(self) -> Path:
        if self._folder is None:
            raise NotSupportedError(
                "Slots cannot be saved, restored or erased here: engine.slot_folder is not set.",
                "action",
            )
        return self._folder

    def _check_room(self, path: Path, n_bytes: int) -> None:
        """Raises StorageFullError if this file is more than the folder may hold, or the disk can."""
        taken = sum(
            entry.stat(follow_symlinks=False).st_size
            for entry in os.scandir(path.parent)
            if entry.is_file(follow_symlinks=False)
        )
        replaced = path.stat().st_size if path.is_file() else 0
        room = MOST_BYTES - (taken - replaced)
        # The old file is there until the new one is whole.
        free = shutil.disk_usage(path.parent).free
        if n_bytes > room:
            raise StorageFullError(
                f"The slot takes {n_bytes} bytes, and engine.slot_folder has room for {max(0, room)} of "
                f"{MOST_BYTES}: delete files."
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
    """Lets one process of this machine in at a time. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
