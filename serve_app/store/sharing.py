"""A cluster's single download of a file: the nodes copy it from each other while it is downloaded.

The nodes that want a file stand in a line, in the order in which they began. The first one asks the origin,
and each other one copies from the node before it, piece by piece, while that one is still downloading. A
node that dies or makes no progress is skipped. The order is the same for all, so nodes never wait for each
other in a circle. Ray's head keeps the lines. An entry may be old: a node that is asked in vain shows that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.store.ray_values import LOOK_S, IdleActor, actor_named
from serve_app.store.remote import Holder, Listing, Peers, RemoteFile, Sharing
from serve_app.store.shared_entries import NumberedEntries, shared_values

logger = logging.getLogger("corral.store")

_READ_BYTES = 4 * 2**20
"""Bytes that are read from another node at once. Each thread of a download holds one such part, and so does
each node for every piece that leaves it."""
_FIRST_READ_S = 60.0
"""Longest wait for a node's first answer: its process may have to be started."""
_READ_S = 20.0
_N_TRIES = 3
_LOOK_EVERY_S = 0.2
_ORDER_EVERY_S = 2.0
"""Seconds between two looks at who stands before this node."""
STALL_S = 20.0
"""A node that has made no progress for so long is skipped."""
AVOID_S = 60.0
"""A node that failed is not asked again for so long."""
_N_AT_ONCE = 64
"""Calls of that process, most of which wait for the disk."""
_FILES = NumberedEntries("files", "nodes")


class MissingPieceError(Exception):
    """A node does not have what it should have, and will not get it."""


class UpstreamChangedError(Exception):
    """Another node stands before this one now."""


class HolderLine:
    """The nodes that have one file or download it, in the order in which they began, as Ray's head keeps
    them. All methods ask Ray's head, block meanwhile, and raise its errors."""

    def __init__(self, key: str) -> None:
        """`key` is that of the file's content; see `_key`."""
        self._key = key

    def add(self, node: str, path: str, *, is_whole: bool = False, is_cut_off: bool = False) -> int:
        """Have a node behind all others. Returns its number."""
        for holder in self.read():
            if holder.node == node:
                self.remove(holder.number)
        holder = Holder(-1, node, path, is_whole, is_cut_off)
        return _FILES.add(self._key, _entry(holder))

    def make_whole(self, holder: Holder) -> None:
        _FILES.replace(self._key, holder.number, _entry(holder) | {"is_whole": True})

    def remove(self, number: int) -> None:
        """Forget a node that does not have the file any more."""
        _FILES.remove(self._key, number)

    def read(self) -> list[Holder]:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"] for node in nodes if node["Alive"]}
        holders = [Holder(number, **entry) for number, entry in _FILES.read(self._key)]
        return [holder for holder in holders if holder.node in alive]


def _entry(holder: Holder) -> dict[str, Any]:
    return {name: value for name, value in asdict(holder).items() if name != "number"}


class ClusterSharing(Sharing):
    """The Sharing of a process of Ray's."""

    @cached_property
    def _node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def peers(self, file: RemoteFile, path: Path, stop: threading.Event) -> Peers:
        return ClusterPeers(self._node, _key(file), path, stop)

    def announce(self, file: RemoteFile, path: Path, *, is_whole: bool = True) -> None:
        """Let other nodes copy a file, or its header, from here."""
        line = HolderLine(_key(file, is_whole=is_whole))
        try:
            for holder in line.read():
                if (holder.node, holder.path) == (self._node, str(path)):
                    if not holder.is_whole:
                        line.make_whole(holder)
                    return
            line.add(self._node, str(path), is_whole=True)
        except Exception as error:  # Ray's head is away for a moment
            logger.warning("Other nodes do not learn which files are here: %r.", error)

    def read_header(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        for is_whole in (False, True):
            with suppress(Exception):  # Ray's head is away for a moment
                for holder in HolderLine(_key(file, is_whole=is_whole)).read():
                    if holder.is_whole and holder.node != self._node:
                        data = _read_header(holder, start, end)
                        if data is not None:
                            return data
        return None

    def put_listing(self, name: str, listing: Listing) -> None:
        with suppress(Exception):  # Ray's head is away for a moment
            value = json.dumps(listing).encode()
            shared_values().put(f"listings/{name}", value, overwrite=True)

    def listing(self, name: str) -> Listing | None:
        with suppress(Exception):
            value = shared_values().get(f"listings/{name}")
            return None if value is None else dict(json.loads(value))
        return None


class ClusterPeers(Peers):
    """A download's place in the line for a file, and the nodes before it. Any thread."""

    def __init__(self, node: str, key: str, path: Path, stop: threading.Event) -> None:
        self._node, self._line, self._path, self._stop = node, HolderLine(key), path, stop
        self._ordering = threading.Lock()
        self._number: int | None = None
        self._upstream: Holder | None = None
        self._look_at = 0.0
        self._avoided: dict[int, float] = {}
        self._actors: dict[str, Any] = {}
        self._show_progress()  # its file may have been made long ago, with the model's other files

    def upstream(self) -> Holder | None:
        """The node right before this one, or else one that has the whole file; None for the origin. While
        Ray's head is away, it stays what it was."""
        with self._ordering:
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _ORDER_EVERY_S
                try:
                    if self._number is None:
                        self._number = self._line.add(self._node, str(self._path))
                    self._upstream = chosen(self._others(), self._number)
                except Exception as error:
                    logger.warning("Which nodes have files is not known for a moment: %r.", error)
            return self._upstream

    def _others(self) -> list[Holder]:
        now = time.monotonic()
        return [
            holder
            for holder in self._line.read()
            if holder.node != self._node and now >= self._avoided.get(holder.number, now)
        ]

    def read(self, holder: Holder, piece: int, start: int, end: int) -> Iterator[bytes]:
        """Bytes of a piece from a node, as soon as it has got the piece. Raises MissingPieceError,
        UpstreamChangedError, RayError and GetTimeoutError."""
        for at in range(start, end, _READ_BYTES):
            while True:
                arguments = holder.path, piece, at, min(end, at + _READ_BYTES)
                data: bytes | None = self._ask(holder.node, "read", *arguments)
                if data is not None:
                    yield data
                    break
                self._wait(holder)

    def _wait(self, holder: Holder) -> None:
        """Give a node time to get a piece. Its progress is this node's, for the next one in the line."""
        self._stop.wait(_LOOK_EVERY_S)
        age_s: float | None = self._ask(holder.node, "age", holder.path)
        if age_s is None or age_s > STALL_S:
            raise MissingPieceError("the file is gone" if age_s is None else "no progress")
        upstream = self.upstream()
        if self._stop.is_set() or upstream is None or upstream.number != holder.number:
            raise UpstreamChangedError
        self._show_progress()

    def _show_progress(self) -> None:
        """Make the file younger, by which other nodes see progress."""
        with suppress(OSError):
            os.utime(self._path.with_name(f"{self._path.name}.part"))

    def _ask(self, node: str, method: str, *arguments: object) -> Any:
        """The answer of a node's actor. Raises RayError, ValueError, GetTimeoutError if it is late."""
        for _ in range(_N_TRIES):
            known = self._actors.get(node)
            actor = known or peer_on(node)
            reference = getattr(actor, method).remote(*arguments)
            try:
                answer = self._got(reference, _READ_S if known else _FIRST_READ_S)
            except ActorDiedError:  # it had nothing to do for long, and has just ended
                self._actors.pop(node, None)
                self._stop.wait(_LOOK_EVERY_S)
                continue
            self._actors[node] = actor
            return answer
        raise MissingPieceError("nobody reads its files")

    def _got(self, reference: Any, limit_s: float) -> Any:
        deadline = time.monotonic() + limit_s
        while True:
            ready, _ = ray.wait([reference], timeout=_LOOK_EVERY_S)
            if ready:
                return ray.get(reference)
            if self._stop.is_set() or time.monotonic() > deadline:
                ray.cancel(reference)
                raise GetTimeoutError("it does not answer")

    def avoid(self, holder: Holder, error: Exception) -> None:
        """Skip a node for a while, unless only the order has changed."""
        if isinstance(error, UpstreamChangedError) or self._stop.is_set():
            return
        logger.warning("Node %s did not give a piece: %r.", holder.node[:8], error)
        with self._ordering:
            self._avoided[holder.number] = time.monotonic() + AVOID_S
            self._look_at = 0.0
        if isinstance(error, ActorUnschedulableError):  # the node is gone
            with suppress(Exception):
                self._line.remove(holder.number)

    def step_back(self) -> bool:
        """Go to the end of the line, if somebody else may reach the origin."""
        with self._ordering:
            self._look_at = 0.0
        if self.upstream() is not None:
            return True
        with self._ordering, suppress(Exception):  # Ray's head is away for a moment
            if any(not holder.is_cut_off for holder in self._others()):
                self._number = self._line.add(self._node, str(self._path), is_cut_off=True)
                self._look_at = 0.0
                return True
        return False

    def withdraw(self) -> None:
        with self._ordering:
            if self._number is not None:
                with suppress(Exception):  # nodes that ask in vain skip this one
                    self._line.remove(self._number)
                self._number = None
                self._look_at = float("inf")


def chosen(others: list[Holder], number: int) -> Holder | None:
    """The node to copy from: the last one before, or else the last one with the whole file. Pure."""
    before = [holder for holder in others if holder.number < number]
    return max(
        before or [holder for holder in others if holder.is_whole],
        key=lambda holder: holder.number,
        default=None,
    )


def _read_header(holder: Holder, start: int, end: int) -> bytes | None:
    try:
        answer = peer_on(holder.node).read.remote(holder.path, 0, start, end)
        data: bytes | None = ray.get(answer, timeout=_FIRST_READ_S)
    except Exception as error:
        logger.info("Node %s does not give a header: %r.", holder.node[:8], error)
        return None
    return data


def _key(file: RemoteFile, *, is_whole: bool = True) -> str:
    """The key of a file's content, or of its header alone."""
    content = file.sha256 or (file.name, file.version)
    identity = repr((content, file.n_bytes, is_whole)).encode()
    return blake2b(identity, digest_size=16).hexdigest()


class PeerActor(IdleActor):
    """A process on a node that reads the node's files for other nodes. It is started by the first node
    that asks for something."""

    def __init__(self) -> None:
        self._asked = time.monotonic()

    def is_needed(self) -> bool:
        return time.monotonic() - self._asked < LOOK_S

    async def read(self, path: str, piece: int, start: int, end: int) -> bytes | None:
        """Bytes of the file that is, or will be, at that path; None if that piece is not there."""
        self._note_use()
        return await asyncio.to_thread(_read, Path(path), piece, start, end)

    async def age(self, path: str) -> float | None:
        """Seconds since the download of that file made progress, 0 if it is whole; None without a file."""
        self._note_use()
        return await asyncio.to_thread(_age, Path(path))

    def _note_use(self) -> None:
        self._asked = time.monotonic()
        self.watch()


def peer_on(node: str) -> Any:
    """The actor of a node, started if it must be. Asks Ray's head. Raises RayError or ValueError."""
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return actor_named(f"files-{node}", PeerActor, n_at_once=_N_AT_ONCE, scheduling_strategy=place)


def _age(path: Path) -> float | None:
    for _ in range(2):  # the part may become the whole file between two looks
        if path.exists():
            return 0.0
        with suppress(OSError):
            return time.time() - path.with_name(f"{path.name}.part").stat().st_mtime
    return None


def _read(path: Path, piece: int, start: int, end: int) -> bytes | None:
    try:
        descriptor = _open(path, piece)
        if descriptor is None:
            return None
        try:
            data = os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)
    except OSError:  # it was removed to make room
        return None
    return data if len(data) == end - start else None


def _open(path: Path, piece: int) -> int | None:
    """The whole file, or the part of it that is here if that piece is. Raises OSError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        part = os.open(path.with_name(f"{path.name}.part"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = path.with_name(f"{path.name}.pieces").read_bytes()[piece : piece + 1]
    except OSError:  # it has become whole just now: it is the same file
        return part
    if done == b"\1":
        return part
    os.close(part)
    return None
