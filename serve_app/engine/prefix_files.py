"""The stored prefixes' copies on disk, one file each, so that a restart finds them.

A file is what `_FIELDS` names, a checksum of all the rest, the tokens, and the state. It is checked
before any of it is used: llama.cpp believes what a state says.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from serve_app.engine.backend import State
from serve_app.engine.prefix_store import StoredPrefix
from serve_app.errors import ConfigError

logger = logging.getLogger("corral.engine")

_MAGIC = b"CorralPx"
_VERSION = 1
_FIELDS = struct.Struct("<8sI32sIQ")  # magic, version, fingerprint, tokens, bytes of state
_DIGEST_BYTES = 32
_TOKEN_BYTES = 4
_UNFINISHED = ".unfinished"
# A file that nobody has written to for so long is left from a process that died.
_ABANDONED_S = 3600.0
# Prefixes that wait for the disk, tens of MB each; one more is being written.
_MAX_QUEUED = 4


class _RefusedError(Exception):
    """A file must not be used; the message says why."""


class PrefixFiles:
    """The copies of one model's prefixes, in a folder of their own within `folder`.

    `fingerprint` is all that a state depends on: the model, the context's parameters, llama.cpp's
    version. Several models may share `folder`, and several replicas of one model: each file is whole,
    and good for all of them. What one discards, all have lost on disk, until they add it again.
    Nobody but the owner can read the files: they hold what users wrote.

    One thread at a time may call, the decoder thread: `load` first, `close` last. Only `load` and
    `close` wait for the disk; the rest is done in order by a thread of this object's own. Raises
    ConfigError if the folder cannot be made, or made private.
    """

    def __init__(self, folder: Path, fingerprint: bytes) -> None:
        self._key = blake2b(fingerprint, digest_size=_DIGEST_BYTES).digest()
        self._folder = folder / self._key[:16].hex()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"Prefixes cannot be kept in {folder}: {error}") from error
        # By file name: what is to be there, None for nothing. Both threads use it, each operation
        # is atomic; the writer takes out what is there by then, so that the last wish counts.
        self._wishes: dict[str, StoredPrefix | None] = {}
        self._intact: set[str] = set()  # names that were read or written here; the writer's
        self._complaints: set[object] = set()  # kinds of errors that were logged; the writer's
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="corral-prefix-files")

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
            except (OSError, _RefusedError) as error:
                logger.warning("The stored prefix %s is not loaded: %s", path, error)
                continue
            budget_bytes -= len(prefix.state)
            self._intact.add(path.name)
            found.append(prefix)
        return found[::-1]

    def add(self, prefix: StoredPrefix) -> None:
        """Have it on disk soon, as the most recently used; if it is there already, that is all that
        changes. With too much to write already, it is left out, with a line in the log."""
        name = self._name(prefix.tokens)
        wishes = list(self._wishes.values())
        n_queued = len(wishes) - wishes.count(None)
        if n_queued >= _MAX_QUEUED and self._wishes.get(name) is None:
            logger.warning("A prefix is not written: %d others wait for the disk.", n_queued)
        else:
            self._wish(name, prefix)

    def discard(self, prefix: StoredPrefix) -> None:
        """Have it on disk no more; if it was not written yet, it never is. Idempotent."""
        self._wish(self._name(prefix.tokens), None)

    def close(self) -> None:
        """Wait until everything is on disk. Idempotent; nothing may be added or discarded after."""
        self._writer.shutdown()

    def _wish(self, name: str, prefix: StoredPrefix | None) -> None:
        self._wishes[name] = prefix
        self._writer.submit(self._fulfil, name)

    def _name(self, tokens: list[int]) -> str:
        return blake2b(self._key + _packed(tokens), digest_size=16).hexdigest() + ".prefix"

    def _newest_first(self) -> list[Path]:
        """All files but unfinished ones; of those, remove what is abandoned."""
        aged: list[tuple[int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another replica may be faster
                modified_ns = path.stat().st_mtime_ns
                if path.suffix != _UNFINISHED:
                    aged.append((modified_ns, path))
                elif time.time() - modified_ns / 1e9 > _ABANDONED_S:
                    path.unlink()
        return [path for _, path in sorted(aged, reverse=True)]

    def _read(self, path: Path, room_bytes: int) -> StoredPrefix | None:
        """The prefix in a file, None if its state takes more than `room_bytes`. Raises _RefusedError,
        OSError."""
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _RefusedError("it is not a file")
        with path.open("rb") as file:
            fields, checksum = file.read(_FIELDS.size), file.read(_DIGEST_BYTES)
            if len(checksum) < _DIGEST_BYTES or not fields.startswith(_MAGIC):
                raise _RefusedError("it is not a stored prefix, or cut off in its header")
            _, version, key, n_tokens, n_state = _FIELDS.unpack(fields)
            if version != _VERSION:
                raise _RefusedError(f"it is of version {version}, this program reads {_VERSION}")
            if key != self._key:
                raise _RefusedError("it is of another model, context or version of llama.cpp")
            n_bytes = _FIELDS.size + _DIGEST_BYTES + n_tokens * _TOKEN_BYTES + n_state
            if status.st_size != n_bytes:
                raise _RefusedError(f"it has {status.st_size} bytes, its header says {n_bytes}")
            if n_state > room_bytes:
                return None
            tokens, state = file.read(n_tokens * _TOKEN_BYTES), file.read(n_state)
        if _checksum(fields, tokens, state) != checksum:
            raise _RefusedError("its checksum is wrong")
        prefix = StoredPrefix(list(struct.unpack(f"<{n_tokens}i", tokens)), state)
        if path.name != self._name(prefix.tokens):
            raise _RefusedError("it is not under its own name")
        return prefix

    # -- writer thread ----------------------------------------------------------------------------

    def _fulfil(self, name: str) -> None:
        """Make the disk what is wished for, unless an earlier call has; never raises."""
        if name not in self._wishes:
            return
        prefix = self._wishes.pop(name)
        try:
            if prefix is None:
                self._intact.discard(name)
                (self._folder / name).unlink(missing_ok=True)
            elif not self._touch(name):
                self._write(name, prefix)
        except Exception as error:
            kind = error.errno if isinstance(error, OSError) else type(error)
            if kind not in self._complaints:
                self._complaints.add(kind)
                logger.error("Prefixes in %s are not kept up to date: %r", self._folder, error)

    def _touch(self, name: str) -> bool:
        """Make a file the most recently used; False if it has to be written."""
        with contextlib.suppress(FileNotFoundError):  # another replica discarded it
            if name in self._intact:
                os.utime(self._folder / name)
                return True
        return False

    def _write(self, name: str, prefix: StoredPrefix) -> None:
        """Make a file, whole or not at all."""
        tokens = _packed(prefix.tokens)
        fields = _FIELDS.pack(_MAGIC, _VERSION, self._key, len(prefix.tokens), len(prefix.state))
        checksum = _checksum(fields, tokens, prefix.state)
        descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, dir=self._folder)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines((fields, checksum, tokens, prefix.state))
                file.flush()
                os.fsync(descriptor)
            Path(unfinished).replace(self._folder / name)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
        self._intact.add(name)


def _packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _checksum(*parts: State) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
