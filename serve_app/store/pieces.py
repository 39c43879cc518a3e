"""The pieces of a file that is downloaded, and what other nodes of a cluster do for each other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serve_app.store.remote import Listing, RemoteFile


class MissingPieces:
    """Hands out the pieces that a download lacks, in their order. Any thread."""

    def __init__(self, have: bytes) -> None:
        """`have` has a byte for each piece, 1 if it is here."""
        self._pieces = deque(piece for piece, is_done in enumerate(have) if not is_done)
        self._changing = threading.Lock()

    def next(self) -> int | None:
        """The piece to fetch now; None if there is none left."""
        with self._changing:
            return self._pieces.popleft() if self._pieces else None

    def put_back(self, piece: int) -> None:
        """Hand a piece out again that did not come."""
        with self._changing:
            self._pieces.appendleft(piece)


@dataclass(frozen=True, slots=True)
class Holder:
    """A node that has a file, or downloads it."""

    number: int
    """Position in the order in which the nodes began."""
    node: str
    path: str
    """The file's path on that node."""
    is_whole: bool = False
    is_cut_off: bool = False
    """Whether the node could not reach the origin."""


class Peers(Protocol):
    """The other nodes that have a file or download it, as one download sees them. Any thread."""

    def upstream(self) -> Holder | None:
        """The node to copy from now; None for the origin."""

    def read(self, holder: Holder, piece: int, start: int, end: int) -> Iterator[bytes]:
        """Bytes of a piece from a node, by their positions in the file. Waits while the node has not got
        the piece. Raises what networks do."""

    def avoid(self, holder: Holder, error: Exception) -> None:
        """Do not copy from a node for a while."""

    def step_back(self) -> bool:
        """Let another node ask the origin, which this node cannot reach. Whether there is one."""

    def withdraw(self) -> None:
        """Others must not have the file from here: it is damaged, or did not come. Idempotent."""


class Sharing(Protocol):
    """Files that nodes of a cluster have for each other. Any thread may call; nothing raises, as each node
    can do without the others."""

    def peers(self, file: RemoteFile, path: Path, stop: threading.Event) -> Peers:
        """The others that have a file, or download it. From now on they may copy it from here, where it is
        going to be at that path."""

    def announce(self, file: RemoteFile, path: Path, *, is_whole: bool = True) -> None:
        """Others may have the file from there, or its header if it is not whole."""

    def read_header(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        """Bytes of a file, from a node that has it or its header, which may end before; None if there
        is no such node."""

    def tell(self, name: str, listing: Listing) -> None:
        """Others may want to know the files of that name."""

    def told(self, name: str) -> Listing | None:
        """The files of that name, from a node that knew."""


class Alone:
    """A node that has no others: its own Sharing and Peers."""

    def peers(self, file: RemoteFile, path: Path, stop: threading.Event) -> Peers:
        """Nobody else."""
        return self

    def upstream(self) -> Holder | None:
        """The origin."""
        return None

    def read(self, holder: Holder, piece: int, start: int, end: int) -> Iterator[bytes]:
        """Never called: there is no upstream."""
        raise NotImplementedError

    def avoid(self, holder: Holder, error: Exception) -> None:
        """Nothing."""

    def step_back(self) -> bool:
        """Nobody else asks the origin."""
        return False

    def withdraw(self) -> None:
        """Nothing."""

    def announce(self, file: RemoteFile, path: Path, *, is_whole: bool = True) -> None:
        """Nothing."""

    def read_header(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        """No node has it."""
        return None

    def tell(self, name: str, listing: Listing) -> None:
        """Nothing."""

    def told(self, name: str) -> Listing | None:
        """Nobody knew."""
        return None


ALONE = Alone()
