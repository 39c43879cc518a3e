"""Where the pieces of a file come from: all from its origin, unless somebody knows better."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serve_app.store.remote import Listing, RemoteFile


@dataclass(frozen=True, slots=True)
class Take:
    """One piece that is to be fetched now."""

    piece: int
    node: str | None = None
    """The node that has it; None for the origin."""
    path: str = ""
    """Where that node has it."""
    is_last_resort: bool = True
    """Whether nobody else could fetch it instead."""


class PieceSource(Protocol):
    """Hands out the pieces of one file, to the threads of one download."""

    def next(self) -> Take | None:
        """The piece to fetch now; waits for one. None if there is none left, or the download stops. Each
        is followed by `done` or `failed`, or the download ends."""

    def read(self, take: Take, start: int, end: int) -> Iterator[bytes]:
        """Bytes of a piece that a node has, by their positions in the file. Raises what networks do."""

    def renew(self, take: Take) -> None:
        """Some of it has come. May be called as often as that happens."""

    def done(self, take: Take) -> None:
        """It is on the disk."""

    def failed(self, take: Take, error: Exception) -> None:
        """It did not come from there. It is handed out again."""

    def withdraw(self) -> None:
        """The content is damaged: others must not have it from here."""

    def close(self) -> None:
        """Whatever is not done will not be."""


class Sharing(Protocol):
    """Files that nodes of a cluster have for each other. Any thread may call; nothing raises, as each node
    can do without the others."""

    def source(
        self, file: RemoteFile, path: Path, have: bytes, stop: threading.Event
    ) -> PieceSource:
        """The source of a file that is to be at that path. `have` has a byte for each piece, 1 if it is
        here. Others get the pieces that are done."""

    def announce(self, file: RemoteFile, path: Path, *, is_whole: bool = True) -> None:
        """Others may have the file from there, or its header if it is not whole."""

    def read_header(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        """These bytes of a file, from a node that has it or its header, which may end before; None if there
        is no such node."""

    def tell(self, name: str, listing: Listing) -> None:
        """Others may want to know the files of that name."""

    def told(self, name: str) -> Listing | None:
        """The files of that name, from a node that knew."""


class FromOrigin:
    """All pieces come from the origin, in their order. Any thread."""

    def __init__(self, have: bytes, stop: threading.Event) -> None:
        self._missing = iter([piece for piece, done in enumerate(have) if not done])
        self._stop = stop
        self._taking = threading.Lock()

    def next(self) -> Take | None:
        """See PieceSource."""
        with self._taking:
            piece = None if self._stop.is_set() else next(self._missing, None)
        return None if piece is None else Take(piece)

    def read(self, take: Take, start: int, end: int) -> Iterator[bytes]:
        """See PieceSource; no node has any."""
        raise NotImplementedError

    def renew(self, take: Take) -> None:
        """See PieceSource."""

    def done(self, take: Take) -> None:
        """See PieceSource."""

    def failed(self, take: Take, error: Exception) -> None:
        """See PieceSource; there is nobody else to hand it to."""

    def withdraw(self) -> None:
        """See PieceSource."""

    def close(self) -> None:
        """See PieceSource."""


class Alone:
    """A node that has no others. See Sharing."""

    def source(
        self, file: RemoteFile, path: Path, have: bytes, stop: threading.Event
    ) -> PieceSource:
        """See Sharing."""
        return FromOrigin(have, stop)

    def announce(self, file: RemoteFile, path: Path, *, is_whole: bool = True) -> None:
        """See Sharing."""

    def read_header(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        """See Sharing."""
        return None

    def tell(self, name: str, listing: Listing) -> None:
        """See Sharing."""

    def told(self, name: str) -> Listing | None:
        """See Sharing."""
        return None


ALONE = Alone()
