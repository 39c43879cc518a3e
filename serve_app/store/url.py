"""Models at any URL that fsspec reads: https://, s3://, gs://, a shared file system as file://."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from serve_app.errors import ConfigError
from serve_app.llama import shards
from serve_app.store.remote import (
    AskOthers,
    RemoteFile,
    RemoteModel,
    UnreachableError,
    keep,
    kept,
    nobody,
)

# What kinds of file systems tell a changed file by.
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "last_modified")
_CHUNK_BYTES = 2**20
logger = logging.getLogger("corral.store")


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


def find(url: str, folder: Path, others: AskOthers = nobody) -> RemoteModel:
    """The file there, with its other shards if it is the first of several. The listing is kept in
    that folder, in case the server does not answer later; `others` may know one, too. Raises
    ConfigError."""
    first, *later = shards.names(url)
    file_system, path = _open(first)
    paths = [path, *(file_system._strip_protocol(other) for other in later)]
    before = folder / f"{blake2b(url.encode(), digest_size=16).hexdigest()}.json"
    try:
        files = tuple(_described(file_system, path) for path in paths)
    except UnreachableError as error:
        listing = kept(before) or others()
        if listing is None:
            raise
        logger.warning("%s. What it answered before is used.", error)
        files = tuple(RemoteFile(**one) for one in listing["files"])
    else:
        keep(before, {"files": [asdict(file) for file in files]})
    return RemoteModel(path.rpartition("/")[2], files, UrlOrigin(file_system))


def _open(url: str) -> tuple[Any, str]:
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
