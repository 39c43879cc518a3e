"""A model's files where they come from: what is known of them, and a way to read them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from serve_app.errors import ConfigError


class UnreachableError(ConfigError):
    """Nobody answers where the files come from; another time may be better."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file."""

    path: str
    """How its origin calls it."""
    n_bytes: int
    sha256: str | None = None
    """SHA-256 of the content in hexadecimal digits, if the origin tells."""
    version: str = ""
    """The origin's mark of the file's version, if it has no such sum."""

    @property
    def name(self) -> str:
        """Without folders: what it is called here."""
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
    """Name for people, the same for other versions."""
    files: tuple[RemoteFile, ...]
    origin: Origin
    commit: str = ""
    """Commit of the repository, if the model comes from one."""

    @property
    def listing(self) -> Listing:
        """The known facts of its files, to find them again."""
        return {"commit": self.commit, "files": [asdict(file) for file in self.files]}

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.n_bytes for file in self.files)

    @property
    def folder(self) -> str:
        """A name for a folder of its own: other content has another."""
        told = [(file.name, file.n_bytes, file.sha256 or file.version) for file in self.files]
        key = blake2b(repr(told).encode(), digest_size=8).hexdigest()
        return f"{safe(self.label)}--{key}"


AskOthers = Callable[[], Listing | None]
"""Asks other nodes for the listing of the same files."""


def nobody() -> Listing | None:
    """There are no others."""
    return None


def kept(path: Path) -> Listing | None:
    """The listing that was kept there."""
    with suppress(OSError, ValueError):
        found: Listing = json.loads(path.read_text())
        return found
    return None


def keep(path: Path, listing: Listing) -> None:
    """For another time; a folder that cannot be written only costs another question."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(listing))
        part.replace(path)


def safe(text: str) -> str:
    """A text as part of a file's name."""
    kept = "".join(one if one.isalnum() or one in "._-" else "-" for one in text)
    return kept.lstrip(".")[-150:]
