"""Downloads a file in pieces, several at once. What is there when a process dies is there for the next one.

Beside the file, while it is not whole, lie `NAME.part`, as long as the file, and `NAME.pieces`, a byte for
each piece: 1 once it is on the disk. The file has its own name only when it is whole and checked.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.store.remote import Origin, RemoteFile, UnreachableError

PIECE_BYTES = 16 * 2**20
N_AT_ONCE = 4
_MOST_FAILURES = 6
"""In a row, without a byte in between."""
_LONGEST_PAUSE_S = 15.0
_DONE = b"\1"
logger = logging.getLogger("corral.store")

OnBytes = Callable[[int], None]
"""Is told how many more bytes are there; negative if they are not any more. Any thread."""


class DamagedError(ConfigError):
    """What came is not what the origin had promised."""


def n_present(folder: Path, file: RemoteFile) -> int:
    """Bytes of the file that are here, whole or in pieces."""
    if is_whole(folder, file):
        return file.n_bytes
    part, pieces = _beside(folder, file)
    if _size(part) != file.n_bytes:
        return 0
    try:
        done = pieces.read_bytes()
    except OSError:
        return 0
    return min(file.n_bytes, done.count(_DONE) * PIECE_BYTES)


def is_whole(folder: Path, file: RemoteFile) -> bool:
    """Whether the file is here, and was checked."""
    return _size(folder / file.name) == file.n_bytes


def reserve(folder: Path, file: RemoteFile) -> None:
    """Make the file that pieces go to. From then on, it counts as what it will be. Raises OSError."""
    part, pieces = _beside(folder, file)
    n_pieces = -(-file.n_bytes // PIECE_BYTES)
    if _size(part) == file.n_bytes and _size(pieces) == n_pieces:
        return
    pieces.unlink(missing_ok=True)
    with part.open("wb") as made:
        made.truncate(file.n_bytes)
    pieces.write_bytes(bytes(n_pieces))


def fetch(origin: Origin, file: RemoteFile, folder: Path, on_bytes: OnBytes) -> None:
    """Have the file in that folder, whole. One caller at a time for each file. Raises ConfigError: a full
    disk, a damaged file, an origin that does not answer."""
    if is_whole(folder, file):
        return
    part, pieces = _beside(folder, file)
    try:
        reserve(folder, file)
        _Fetching(origin, file, part, pieces, on_bytes).run()
        _check(origin, file, part)
        part.replace(folder / file.name)
        pieces.unlink()
        _sync(folder)
    except DamagedError:
        for path in (pieces, part):
            path.unlink(missing_ok=True)
        raise
    except OSError as error:
        raise disk_error(folder, error) from error


def disk_error(folder: Path, error: OSError) -> ConfigError:
    """What it means that the disk does not take a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(
            f"The disk of {folder} is full. What has been downloaded stays there, and the download goes on "
            "from there when there is room: make some, or set downloads.folder to another disk."
        )
    return ConfigError(f"{folder} cannot be written: {error}")


class _Fetching:
    """Fetches the pieces that are missing."""

    def __init__(
        self, origin: Origin, file: RemoteFile, part: Path, pieces: Path, on_bytes: OnBytes
    ) -> None:
        self._origin, self._file, self._on_bytes = origin, file, on_bytes
        self._part, self._pieces = part, pieces
        self._stop = threading.Event()

    def run(self) -> None:
        """Raises ConfigError and OSError."""
        missing = [i for i, done in enumerate(self._pieces.read_bytes()) if not done]
        with ExitStack() as stack:
            part = stack.enter_context(self._part.open("r+b")).fileno()
            done = stack.enter_context(self._pieces.open("r+b")).fileno()
            pool = stack.enter_context(ThreadPoolExecutor(N_AT_ONCE, "download"))
            stack.callback(self._stop.set)
            running = [pool.submit(self._piece, i, part, done) for i in missing]
            wait(running, return_when=FIRST_EXCEPTION)
            self._stop.set()
            for one in running:
                one.cancel()
            for one in running:
                if not one.cancelled():
                    one.result()

    def _piece(self, i: int, part: int, done: int) -> None:
        start = at = i * PIECE_BYTES
        end = min(self._file.n_bytes, start + PIECE_BYTES)
        failures = 0
        while at < end and not self._stop.is_set():
            before = at
            try:
                for chunk in self._origin.read(self._file, at, end):
                    at += self._write(part, chunk[: end - at], at)
                    if self._stop.is_set():
                        return
                if at == before:
                    raise EOFError("nothing came")
            except (ConfigError, _WriteError):
                raise
            except Exception as error:  # of a network; each library has its own kinds
                failures = 1 if at > before else failures + 1
                self._pause(failures, error)
        if at == end:
            os.fdatasync(part)
            os.pwrite(done, _DONE, i)

    def _write(self, part: int, chunk: bytes, at: int) -> int:
        view = memoryview(chunk)
        try:
            while view:
                n = os.pwrite(part, view, at)
                view, at = view[n:], at + n
        except OSError as error:
            raise _WriteError(error.errno, error.strerror) from error
        self._on_bytes(len(chunk))
        return len(chunk)

    def _pause(self, failures: int, error: Exception) -> None:
        name = self._file.path
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        if failures >= _MOST_FAILURES:
            raise UnreachableError(
                f"{name} cannot be downloaded: {told}. The part that has arrived is kept for the next try."
            ) from error
        logger.warning("%s: the connection broke (%s); it goes on from there.", name, told)
        self._stop.wait(min(_LONGEST_PAUSE_S, 0.25 * 2**failures))


class _WriteError(OSError):
    """The disk's fault, not the network's."""


def _check(origin: Origin, file: RemoteFile, part: Path) -> None:
    """Raises DamagedError."""
    if not origin.is_current(file):
        raise DamagedError(
            f"{file.path} was changed while it was downloaded. The next try begins anew."
        )
    if file.sha256 is None:
        return
    with part.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != file.sha256:
        raise DamagedError(
            f"{file.path} arrived damaged: its SHA-256 is {found}, and should be {file.sha256}. It was "
            "deleted; the next try begins anew."
        )


def _size(path: Path) -> int | None:
    """In bytes; None if there is no such file."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _beside(folder: Path, file: RemoteFile) -> tuple[Path, Path]:
    return folder / f"{file.name}.part", folder / f"{file.name}.pieces"


def _sync(folder: Path) -> None:
    """So that the file has its name also after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
