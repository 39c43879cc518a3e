"""A model's files where they come from: what is known of them, how they are read, and other nodes' help."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from serve_app.errors import ConfigError
from serve_app.llama import shards

logger = logging.getLogger("corral.store")
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "last_modified")
"""Names by which file systems tell a changed file."""
_CHUNK_BYTES = 2**20


class UnreachableError(ConfigError):
    """Nobody answers where the files come from; another time may be better."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at its origin."""

    path: str
    """How its origin calls it."""
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

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """The bytes from one position up to another, in pieces as they come. Raises ConfigError for what
        another try would not help, and anything else for what it may."""

    def is_current(self, file: RemoteFile) -> bool:
        """Whether the file is still what it was when it was found. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """All files of a model, the one to open first."""

    label: str
    files: tuple[RemoteFile, ...]
    origin: Origin
    commit: str = ""

    @property
    def listing(self) -> Listing:
        """The known facts of its files, to find them again."""
        return {"commit": self.commit, "files": [asdict(file) for file in self.files]}

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def folder(self) -> str:
        """A name for a folder of its own: other content has another."""
        told = [(file.name, file.n_bytes, file.sha256 or file.version) for file in self.files]
        key = blake2b(repr(told).encode(), digest_size=8).hexdigest()
        return f"{safe(self.label)}--{key}"


def kept(path: Path) -> Listing | None:
    with suppress(OSError, ValueError):
        found: Listing = json.loads(path.read_text())
        return found
    return None


def keep(path: Path, listing: Listing) -> None:
    """Keep a listing for another time; a folder that cannot be written only costs another question."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(listing))
        part.replace(path)


def listed(
    path: Path, ask: Callable[[], Listing], *others: Callable[[], Listing | None]
) -> Listing:
    """The listing that `ask` gives, which is kept at that path. If the origin does not answer: what it
    answered before, here or as the others know. Raises what `ask` raises."""
    try:
        listing = ask()
    except UnreachableError as error:
        before = kept(path) or next(filter(None, (ask_other() for ask_other in others)), None)
        if before is None:
            raise
        logger.warning("%s. What is known from before is used.", str(error).rstrip("."))
        return before
    keep(path, listing)
    return listing


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that has a file, or downloads it."""

    number: int
    """Position in the order in which the nodes began."""
    node: str
    path: str
    is_whole: bool = False
    is_cut_off: bool = False
    """Whether the node could not reach the origin."""


class Peers:
    """The other nodes that have a file or download it, as one download sees them: none. Any thread."""

    def upstream(self) -> Holder | None:
        """The node to copy from now; None for the origin."""
        return None

    def read(self, holder: Holder, piece: int, start: int, end: int) -> Iterator[bytes]:
        """Bytes of a piece from a node, by their positions in the file. Waits while the node has not got
        the piece. Raises what networks do."""
        raise NotImplementedError

    def avoid(self, holder: Holder, error: Exception) -> None:
        """Do not copy from a node for a while."""

    def step_back(self) -> bool:
        """Let another node ask the origin, which this node cannot reach. Whether there is one."""
        return False

    def withdraw(self) -> None:
        """Others must not have the file from here: it is damaged, or did not come. Idempotent."""


class Sharing:
    """Files that nodes of a cluster have for each other; this node is alone. Any thread may call; nothing
    raises, as each node can do without the others."""

    def peers(self, file: RemoteFile, path: Path, stop: threading.Event) -> Peers:
        """The others that have or download a file. They may copy it from here, where it is going to be."""
        return Peers()

    def announce(self, file: RemoteFile, path: Path, *, is_whole: bool = True) -> None:
        """Others may have the file from there, or its header if it is not whole."""

    def read_header(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        """Bytes of a file, which may end before, from a node with it or its header; None without any."""
        return None

    def put_listing(self, name: str, listing: Listing) -> None:
        """Others may want to know the files of that name."""

    def listing(self, name: str) -> Listing | None:
        """The files of that name, from a node that knew."""
        return None


ALONE = Sharing()


def safe(text: str) -> str:
    """A text as part of a file's name."""
    letters = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in text)
    return letters.lstrip(".")[-150:]


class UrlOrigin:
    """Reads files of one file system."""

    def __init__(self, file_system: Any) -> None:
        self._files = file_system

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        try:
            for at in range(start, end, _CHUNK_BYTES):
                yield self._files.cat_file(file.path, at, min(end, at + _CHUNK_BYTES))
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(f"{file.path}: {type(error).__name__}") from None

    def is_current(self, file: RemoteFile) -> bool:
        self._files.invalidate_cache()
        return _described(self._files, file.path) == file


def find_url(
    url: str, folder: Path, others: Callable[[], Listing | None] = lambda: None
) -> RemoteModel:
    """The file there, with its other shards if it is the first. The listing is kept in that folder, in case
    the server does not answer later; `others` may know one, too. Raises ConfigError."""
    first, *later = shards.names(url)
    file_system, path = _open_url(first)
    paths = [path, *(file_system._strip_protocol(other) for other in later)]
    kept_at = folder / f"{blake2b(url.encode(), digest_size=16).hexdigest()}.json"

    def ask() -> Listing:
        return {"files": [asdict(_described(file_system, path)) for path in paths]}

    files = tuple(RemoteFile(**file) for file in listed(kept_at, ask, others)["files"])
    return RemoteModel(path.rpartition("/")[2], files, UrlOrigin(file_system))


def _open_url(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        file_system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # a package for s3:// and the like, or no such kind
        raise ConfigError(f"source.url: {error}") from None
    return file_system, str(path)


def _described(file_system: Any, path: str) -> RemoteFile:
    try:
        info = file_system.info(path)
    except FileNotFoundError:
        raise ConfigError(f"source.url: there is no file {path}") from None
    except Exception as error:  # each file system has its own kinds
        raise UnreachableError(
            f"source.url: {path} cannot be reached ({type(error).__name__}: {error})"
        ) from None
    if not info.get("size"):
        raise ConfigError(f"source.url: {path} does not say how long it is")
    versions = [f"{name}={info[name]}" for name in _VERSIONS if info.get(name)]
    return RemoteFile(path, int(info["size"]), version=" ".join([path, *versions]))
