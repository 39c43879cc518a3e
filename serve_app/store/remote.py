"""A model's files where they come from: what is known of them, and how they are read from a URL."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from serve_app.base.errors import ConfigError
from serve_app.config import shards

logger = logging.getLogger("corral.store")
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "last_modified")
"""Names by which file systems tell a changed file."""
_READ_S = 60.0
"""Seconds without a byte over HTTP after which a download fails. The whole may take any time."""
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

OnBytes = Callable[[int], None]
"""Gets the number of bytes that came, or that are to come again if it is negative. Any thread may call."""


class UnreachableError(ConfigError):
    """The origin of the files does not answer; another time may be better."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at its origin."""

    path: str
    """The path at its origin."""
    n_bytes: int
    sha256: str | None = None
    """SHA-256 of the content in hexadecimal digits, if the origin tells."""
    version: str = ""
    """The origin's mark of the file's version, if it has no such sum."""

    @property
    def name(self) -> str:
        """The file's name here, without folders."""
        return PurePosixPath(self.path).name


Listing = dict[str, Any]
"""The files that were found at some time; `files` are the fields of `RemoteFile`s."""


class Origin(Protocol):
    """Reads files. Any thread."""

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """The bytes from one position up to another. Raises ConfigError."""

    def download(self, file: RemoteFile, folder: Path, on_bytes: OnBytes) -> Path:
        """Download a file into an empty folder. Returns where it is. Raises ConfigError, OSError of the
        disk, and what `on_bytes` raises."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """All files of a model, the one to open first."""

    label: str
    files: tuple[RemoteFile, ...]
    origin: Origin
    commit: str = ""

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def folder(self) -> str:
        """A name for a folder of its own: other content has another."""
        content = [(file.name, file.n_bytes, file.sha256 or file.version) for file in self.files]
        key = blake2b(repr(content).encode(), digest_size=8).hexdigest()
        return f"{safe(self.label)}--{key}"


def safe(text: str) -> str:
    """A text as part of a file's name."""
    letters = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in text)
    return letters.lstrip(".")[-150:]


def read_listing(path: Path) -> Listing | None:
    with suppress(OSError, ValueError):
        found: Listing = json.loads(path.read_text())
        return found
    return None


def write_listing(path: Path, listing: Listing) -> None:
    """Keep a listing for another time; a folder that cannot be written only costs another question."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(listing))
        part.replace(path)


def ask_or_remember(
    path: Path, ask: Callable[[], Listing], otherwise: Callable[[], Listing | None] = lambda: None
) -> Listing:
    """The listing that `ask` gives, which is kept at that path. If the origin does not answer: what it
    answered before, or what `otherwise` knows. Raises what `ask` raises."""
    try:
        listing = ask()
    except UnreachableError as error:
        before = read_listing(path) or otherwise()
        if before is None:
            raise
        logger.warning("%s. What is known from before is used.", str(error).rstrip("."))
        return before
    write_listing(path, listing)
    return listing


def is_of_disk(error: Exception) -> bool:
    """Whether an error of a download is this node's disk's, and not the network's."""
    return isinstance(error, OSError) and error.errno in _OF_DISK


class UrlOrigin:
    """Reads files of one of fsspec's file systems."""

    def __init__(self, file_system: Any) -> None:
        self._files = file_system

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        try:
            with self._files.open(file.path, "rb") as opened:
                opened.seek(start)
                return bytes(opened.read(end - start))
        except Exception as error:  # each file system has its own kinds
            raise _unreachable(file.path, error) from None

    def download(self, file: RemoteFile, folder: Path, on_bytes: OnBytes) -> Path:
        from fsspec import Callback

        class ByteCallback(Callback):  # type: ignore[misc]  # fsspec has no types
            def relative_update(self, inc: int = 1) -> None:
                on_bytes(inc)

        path = folder / file.name
        try:
            self._files.get_file(file.path, str(path), callback=ByteCallback())
        except Exception as error:
            if isinstance(error, ConfigError) or is_of_disk(error):
                raise
            raise _unreachable(file.path, error) from None
        self._files.invalidate_cache()
        if path.stat().st_size != file.n_bytes or describe_file(self._files, file.path) != file:
            raise ConfigError(
                f"{file.path} changed during the download. The next try starts again."
            )
        return path


def find_url(url: str, folder: Path) -> RemoteModel:
    """The file there, with its other shards if it is the first. The listing is kept in that folder, in case
    the server does not answer later. Raises ConfigError."""
    first, *later = shards.names(url)
    file_system, path = _open_url(first)
    paths = [path, *(file_system._strip_protocol(other) for other in later)]
    kept_at = folder / f"{blake2b(url.encode(), digest_size=16).hexdigest()}.json"

    def ask() -> Listing:
        return {"files": [asdict(describe_file(file_system, path)) for path in paths]}

    files = tuple(RemoteFile(**file) for file in ask_or_remember(kept_at, ask)["files"])
    return RemoteModel(path.rpartition("/")[2], files, UrlOrigin(file_system))


def _open_url(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    try:
        if url.startswith(("http://", "https://")):
            from aiohttp import ClientTimeout

            # By default, a whole download has five minutes.
            options = {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_read=_READ_S)}}
        file_system, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # a package for s3:// and the like, or no such kind
        raise ConfigError(f"source.url: {error}") from None
    return file_system, str(path)


def describe_file(file_system: Any, path: str) -> RemoteFile:
    """The present facts of a file. Raises ConfigError."""
    try:
        info = file_system.info(path)
    except FileNotFoundError:
        raise ConfigError(f"source.url: there is no file {path}") from None
    except Exception as error:
        raise _unreachable(path, error) from None
    if not info.get("size"):
        raise ConfigError(f"source.url: {path} does not say how long it is")
    versions = [f"{name}={info[name]}" for name in _VERSIONS if info.get(name)]
    return RemoteFile(path, int(info["size"]), version=" ".join([path, *versions]))


def _unreachable(path: str, error: Exception) -> UnreachableError:
    return UnreachableError(
        f"source.url: {path} cannot be reached ({type(error).__name__}: {error})"
    )
