"""Downloads a file in pieces, several at once. If a process dies, the next one continues.

Beside the file, while it is not whole, lie `NAME.part`, as long as the file, and `NAME.pieces`, a byte for
each piece: 1 once it is on the disk. The file has its own name only when it is whole and checked.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.folders import sync
from serve_app.store.remote import (
    ALONE,
    Holder,
    Origin,
    Peers,
    RemoteFile,
    Sharing,
    UnreachableError,
)

PIECE_BYTES = 16 * 2**20
N_AT_ONCE = 4
_MOST_FAILURES = 12
"""Failures in a row, without a byte in between, after which a download ends."""
_FEW_FAILURES = 3
"""Failures after which another node may ask the origin instead."""
_LONGEST_PAUSE_S = 15.0
_DONE = b"\1"
logger = logging.getLogger("corral.store")

OnBytes = Callable[[int, bool], None]
"""Is told how many bytes came or, if negative, are lost, and whether from another node. Any thread."""


class DamagedError(ConfigError):
    """The content differs from what the origin had promised."""


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


def fetch(
    origin: Origin, file: RemoteFile, folder: Path, on_bytes: OnBytes, sharing: Sharing = ALONE
) -> None:
    """Have the file in that folder, whole; pieces that other nodes have come from there. One caller at a
    time for each file. Raises ConfigError: a full disk, a damaged file, an origin that does not answer."""
    if is_whole(folder, file):
        return
    try:
        fetched = _fetched(origin, file, folder, on_bytes, sharing)
        if not fetched:
            logger.warning(
                "%s arrived damaged, in part from other nodes. It is downloaded again, without them.",
                file.path,
            )
            on_bytes(-file.n_bytes, False)
            _fetched(origin, file, folder, on_bytes, ALONE)
    except OSError as error:
        raise disk_error(folder, error) from error


def _fetched(
    origin: Origin, file: RemoteFile, folder: Path, on_bytes: OnBytes, sharing: Sharing
) -> bool:
    """Whether the file is there; False if other nodes may have damaged it. Raises as `fetch`."""
    part, pieces = _beside(folder, file)
    reserve(folder, file)
    stop = threading.Event()
    peers = sharing.peers(file, folder / file.name, stop)
    fetching = _Fetching(origin, file, part, pieces, on_bytes, peers, stop)
    try:
        fetching.run()
        _check(origin, file, part, had_help=fetching.had_help)
        part.replace(folder / file.name)
        pieces.unlink()
        sync(folder)
    except BaseException as error:
        peers.withdraw()
        if not isinstance(error, DamagedError):
            raise
        for path in (pieces, part):
            path.unlink(missing_ok=True)
        if not fetching.had_help:
            raise
        return False
    return True


def enter(origin: Origin, file: RemoteFile) -> None:
    """Before a file comes from other nodes, the origin is asked for a byte: it may refuse the file to this
    node. One that does not answer refuses nothing. Raises ConfigError."""
    try:
        for _ in origin.read(file, 0, 1):
            pass
    except UnreachableError:
        pass
    except ConfigError:
        raise
    except Exception as error:  # of a network; each library has its own kinds
        logger.info("%s cannot be asked for: %r.", file.path, error)


def disk_error(folder: Path, error: OSError) -> ConfigError:
    """The meaning of an error while a file is written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(
            f"The disk of {folder} is full. The downloaded part stays there, and the download continues "
            "when there is room. Make room, or set downloads.folder to another disk."
        )
    return ConfigError(f"{folder} cannot be written: {error}")


class _Fetching:
    def __init__(
        self,
        origin: Origin,
        file: RemoteFile,
        part: Path,
        pieces: Path,
        on_bytes: OnBytes,
        peers: Peers,
        stop: threading.Event,
    ) -> None:
        self._origin, self._file, self._on_bytes = origin, file, on_bytes
        self._part, self._pieces = part, pieces
        self._peers, self._stop = peers, stop
        have = enumerate(pieces.read_bytes())
        self._missing = deque(piece for piece, is_done in have if not is_done)
        self._is_let_in = False
        self._entering = threading.Lock()
        self.had_help = False

    def run(self) -> None:
        """Raises ConfigError and OSError."""
        with ExitStack() as stack:
            part = stack.enter_context(self._part.open("r+b")).fileno()
            done = stack.enter_context(self._pieces.open("r+b")).fileno()
            pool = stack.enter_context(ThreadPoolExecutor(N_AT_ONCE, "download"))
            stack.callback(self._stop.set)
            running = [pool.submit(self._work, part, done) for _ in range(N_AT_ONCE)]
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            for one in ended:
                one.result()

    def _work(self, part: int, done: int) -> None:
        while not self._stop.is_set():
            try:
                piece = self._missing.popleft()
            except IndexError:
                break
            holder = self._peers.upstream()
            if (
                self._from_origin(piece, part)
                if holder is None
                else self._from_node(holder, piece, part)
            ):
                os.fdatasync(part)
                os.pwrite(done, _DONE, piece)
            else:
                self._missing.appendleft(piece)

    def _bounds(self, piece: int) -> tuple[int, int]:
        start = piece * PIECE_BYTES
        return start, min(self._file.n_bytes, start + PIECE_BYTES)

    def _from_node(self, holder: Holder, piece: int, part: int) -> bool:
        self._enter()
        start, end = self._bounds(piece)
        at = start
        self.had_help = True
        try:
            for chunk in self._peers.read(holder, piece, start, end):
                at += self._write(part, chunk, at, is_from_node=True)
        except (ConfigError, _WriteError):
            raise
        except Exception as error:  # of Ray, or of a node that is gone
            self._on_bytes(start - at, True)
            self._peers.avoid(holder, error)
        return at == end

    def _enter(self) -> None:
        with self._entering:
            if not self._is_let_in:
                enter(self._origin, self._file)
                self._is_let_in = True

    def _from_origin(self, piece: int, part: int) -> bool:
        """Whether a piece has come; if not, another node asks the origin, or the download stops."""
        start, end = self._bounds(piece)
        at, failures = start, 0
        while at < end and not self._stop.is_set():
            before = at
            try:
                for chunk in self._origin.read(self._file, at, end):
                    at += self._write(part, chunk[: end - at], at, is_from_node=False)
                    if self._stop.is_set():
                        return False
                if at == before:
                    raise EOFError("nothing came")
            except (ConfigError, _WriteError):
                raise
            except Exception as error:  # of a network; each library has its own kinds
                failures = 1 if at > before else failures + 1
                if failures >= _FEW_FAILURES and self._peers.step_back():
                    self._on_bytes(start - at, False)
                    return False
                self._pause(failures, error)
        self._is_let_in = True
        return at == end

    def _write(self, part: int, chunk: bytes, at: int, *, is_from_node: bool) -> int:
        view = memoryview(chunk)
        try:
            while view:
                n = os.pwrite(part, view, at)
                view, at = view[n:], at + n
        except OSError as error:
            raise _WriteError(error.errno, error.strerror) from error
        self._on_bytes(len(chunk), is_from_node)
        return len(chunk)

    def _pause(self, failures: int, error: Exception) -> None:
        name = self._file.path
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if failures >= _MOST_FAILURES:
            raise UnreachableError(
                f"{name} cannot be downloaded: {reason}. The part that has arrived is kept for the next "
                "try."
            ) from error
        logger.warning(
            "%s: the connection broke (%s). The download continues from there.", name, reason
        )
        self._stop.wait(min(_LONGEST_PAUSE_S, 0.25 * 2**failures))


class _WriteError(OSError):
    """The disk's fault, not the network's."""


def _check(origin: Origin, file: RemoteFile, part: Path, *, had_help: bool) -> None:
    """Raises DamagedError, and UnreachableError if nobody else gave any of the file."""
    try:
        is_current = origin.is_current(file)
    except UnreachableError:
        if not had_help:
            raise
        is_current = True
    if not is_current:
        raise DamagedError(f"{file.path} changed during the download. The next try starts again.")
    if file.sha256 is None:
        return
    with part.open("rb") as whole:
        sha256 = hashlib.file_digest(whole, "sha256").hexdigest()
    if sha256 != file.sha256:
        raise DamagedError(
            f"{file.path} arrived damaged: its SHA-256 is {sha256} instead of {file.sha256}. It was "
            "deleted. The next try starts again."
        )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _beside(folder: Path, file: RemoteFile) -> tuple[Path, Path]:
    return folder / f"{file.name}.part", folder / f"{file.name}.pieces"
