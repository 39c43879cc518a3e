"""The disk tier: copies of the memory tier's prefixes, one file each, so that a restart finds them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from serve_app.engine.kv_cache import state_format
from serve_app.engine.kv_cache.memory_tier import StoredPrefix
from serve_app.engine.kv_cache.packing import packed
from serve_app.engine.kv_cache.state_format import RefusedFileError
from serve_app.errors import ConfigError

logger = logging.getLogger("corral.engine")

# A file that nobody has written to for so long is left from a process that died.
_ABANDONED_S = 3600.0
# Prefixes that wait for the disk, tens of MB each; one more is being written.
_MAX_QUEUED = 4


class DiskTier:
    """The copies of one model's prefixes, in a folder of their own within `folder`.

    `fingerprint` is all that a state depends on: the model, the context's parameters, llama.cpp's
    version. Several models may share `folder`, and several replicas of one model: each file is
    whole, and good for all of them; it says which cache group it is for. A prefix that one of them
    discards is gone from the disk for all, until they add it again. Nobody but the owner can read
    the files: they hold what users wrote.

    One thread at a time may call, the decoder thread: `load` first, `close` last. Only `load` and
    `close` wait for the disk; the rest is done in order by a thread of this object's own. Raises
    ConfigError if the folder cannot be made, or made private.
    """

    def __init__(self, folder: Path, fingerprint: bytes) -> None:
        self._key = state_format.key_of(fingerprint)
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
        told = self._key + group + packed(prefix.tokens)
        return blake2b(told, digest_size=16).hexdigest() + ".prefix"

    def _newest_first(self) -> list[Path]:
        """All files but unfinished ones; of those, remove what is abandoned."""
        aged: list[tuple[int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another replica may be faster
                modified_ns = path.stat().st_mtime_ns
                if path.suffix != state_format.UNFINISHED:
                    aged.append((modified_ns, path))
                elif time.time() - modified_ns / 1e9 > _ABANDONED_S:
                    path.unlink()
        return [path for _, path in sorted(aged, reverse=True)]

    def _read(self, path: Path, room_bytes: int) -> StoredPrefix | None:
        """Read the prefix in a file."""
        prefix = state_format.read(path, self._key, room_bytes)
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
        state_format.write(self._folder / name, self._key, prefix)
        self._intact.add(name)
