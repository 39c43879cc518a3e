"""A node's part in one download for a cluster. See `serve_app.store.pieces.Sharing`."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
)

from serve_app.store.pieces import PieceSource, Take
from serve_app.store.remote import Listing, RemoteFile
from serve_app.store.sharing import holders, peer, tracker

logger = logging.getLogger("corral.store")

_READ_BYTES = 4 * 2**20
"""Bytes that are read from another node at once. Each thread of a download holds one such part, and so does
each node for every piece that leaves it."""
_ANSWER_S = 15.0
_FIRST_READ_S = 60.0
"""A peer may have to be started first."""
_READ_S = 20.0
_N_TRIES = 3
_LOOK_EVERY_S = 0.5
_RENEW_EVERY_S = 2.0
_ALONE_S = 3.0
"""A node that is alone, or cannot reach the tracker, goes on by itself for so long."""


class MissingPieceError(Exception):
    """A node has not what it should have."""


class ClusterSharing:
    """See Sharing. Used in a process of Ray's."""

    @cached_property
    def _node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def source(
        self, file: RemoteFile, path: Path, have: bytes, stop: threading.Event
    ) -> PieceSource:
        """See Sharing."""
        return SharedPieces(self._node, _key(file), path, have, stop)

    def announce(self, file: RemoteFile, path: Path, *, is_whole: bool = True) -> None:
        """See Sharing."""
        try:
            holders.add(_key(file, is_whole=is_whole), self._node, str(path))
        except Exception as error:  # Ray's head is away for a moment
            logger.warning("Other nodes do not learn which files are here: %r.", error)

    def read_header(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        """See Sharing."""
        for is_whole in (False, True):
            with suppress(Exception):  # Ray's head is away for a moment
                for node, path in holders.read(_key(file, is_whole=is_whole)).items():
                    data = None if node == self._node else _read(node, path, start, end)
                    if data is not None:
                        return data
        return None

    def tell(self, name: str, listing: Listing) -> None:
        """See Sharing."""
        with suppress(Exception):  # Ray's head is away for a moment
            holders.put_listing(name, json.dumps(listing))

    def told(self, name: str) -> Listing | None:
        """See Sharing."""
        with suppress(Exception):
            found = holders.listing(name)
            return None if found is None else dict(json.loads(found))
        return None


class SharedPieces:
    """See PieceSource: asks the cluster's tracker which piece comes from where.

    The pieces that are missing, and those that are being fetched, are known here too. So the download goes
    on without a tracker, and another tracker learns them.
    """

    def __init__(self, node: str, key: str, path: Path, have: bytes, stop: threading.Event) -> None:
        self._node, self._key, self._path, self._stop = node, key, path, stop
        self._have = bytearray(have)
        self._takes: dict[int, Take] = {}
        self._renewed: dict[int, float] = {}
        self._changing = threading.Lock()
        self._joining = threading.Lock()
        self._tracker: Any = None
        self._alone_until = 0.0
        self._peers: dict[str, Any] = {}

    def next(self) -> Take | None:
        """See PieceSource."""
        while not self._stop.is_set():
            with self._changing:
                lacking = [
                    piece
                    for piece, there in enumerate(self._have)
                    if not there and piece not in self._takes
                ]
            if not lacking:
                return None
            tracker_now = self._joined()
            take = Take(lacking[0]) if tracker_now is None else self._assigned(tracker_now)
            if take is not None and self._begin(take):
                return take
        return None

    def _begin(self, take: Take) -> bool:
        """Whether no other thread fetches it."""
        with self._changing:
            if self._have[take.piece] or take.piece in self._takes:
                return False
            self._takes[take.piece] = take
        return True

    def read(self, take: Take, start: int, end: int) -> Iterator[bytes]:
        """See PieceSource."""
        for at in range(start, end, _READ_BYTES):
            data = self._asked(take, at, min(end, at + _READ_BYTES))
            if data is None:
                raise MissingPieceError(f"it has no piece {take.piece} any more")
            yield data

    def _asked(self, take: Take, start: int, end: int) -> bytes | None:
        """The part of a piece that the node has. Raises RayError, ValueError, GetTimeoutError if late."""
        assert take.node is not None
        for _ in range(_N_TRIES):
            known = self._peers.get(take.node)
            actor = known or peer.on(take.node)
            answer = actor.read.remote(take.path, take.piece, start, end)
            try:
                data = self._got(answer, _READ_S if known else _FIRST_READ_S)
            except ActorDiedError:  # it had nothing to do for long, and has just ended
                self._peers.pop(take.node, None)
                self._stop.wait(_LOOK_EVERY_S)
                continue
            self._peers[take.node] = actor
            return data
        raise MissingPieceError("nobody reads its files")

    def _got(self, answer: Any, limit_s: float) -> bytes | None:
        """A node's answer. Raises RayError, GetTimeoutError if it is late or the download stops."""
        deadline = time.monotonic() + limit_s
        while True:
            ready, _ = ray.wait([answer], timeout=_LOOK_EVERY_S)
            if ready:
                data: bytes | None = ray.get(answer)
                return data
            if self._stop.is_set() or time.monotonic() > deadline:
                ray.cancel(answer)
                raise GetTimeoutError("it does not answer")

    def renew(self, take: Take) -> None:
        """See PieceSource."""
        now = time.monotonic()
        if now - self._renewed.get(take.piece, 0.0) >= _RENEW_EVERY_S:
            self._renewed[take.piece] = now
            self._tell("renew", take.piece)

    def done(self, take: Take) -> None:
        """See PieceSource."""
        with self._changing:
            self._have[take.piece] = 1
            self._takes.pop(take.piece, None)
        self._tell("done", take.piece)

    def failed(self, take: Take, error: Exception) -> None:
        """See PieceSource."""
        with self._changing:
            self._takes.pop(take.piece, None)
        gone = isinstance(error, ActorUnschedulableError | MissingPieceError)
        if take.node is not None and not self._stop.is_set():
            logger.warning("Node %s did not give a piece: %r.", take.node[:8], error)
        self._tell("failed", take.piece, take.node, gone)

    def close(self) -> None:
        """See PieceSource."""
        self._tell("leave", False)

    def withdraw(self) -> None:
        """See PieceSource."""
        self._tell("leave", True)

    def _tell(self, method: str, *arguments: object) -> None:
        """The tracker, if there is one; nobody waits for its answer."""
        if (actor := self._tracker) is not None:
            with suppress(Exception):
                getattr(actor, method).remote(self._key, self._node, *arguments)

    def _assigned(self, actor: Any) -> Take | None:
        """The tracker's answer; None if it has nothing now, or is lost."""
        with self._changing:
            getting = tuple(self._takes)
        try:
            answer: tracker.PieceAnswer = ray.get(
                actor.next.remote(self._key, self._node, getting), timeout=_ANSWER_S
            )
        except Exception as error:
            self._lose(actor, error)
            return None
        if not answer.is_member:
            self._lose(actor, None)
        return answer.take

    def _lose(self, actor: Any, error: Exception | None) -> None:
        """That tracker does not know this node, or does not answer."""
        with self._joining:
            if self._tracker is actor:
                self._tracker = None
                if error is not None:
                    logger.warning("Who has which files is not known for a moment: %r.", error)

    def _joined(self) -> Any:
        """The tracker that knows this node; None if it is alone for now."""
        with self._joining:
            if self._tracker is None and time.monotonic() >= self._alone_until:
                try:
                    self._tracker = self._join()
                except Exception as error:
                    logger.warning("This node downloads by itself for a moment: %r.", error)
                if self._tracker is None:
                    self._alone_until = time.monotonic() + _ALONE_S
            return self._tracker

    def _join(self) -> Any:
        """Raises what Ray raises."""
        if holders.nodes() <= {self._node}:
            return None
        deadline = time.monotonic() + _ANSWER_S
        while True:
            with self._changing:
                have = bytes(self._have)
                fetching = [piece for piece, take in self._takes.items() if take.node is None]
            told = self._key, self._node, str(self._path), have, fetching
            try:
                actor = tracker.made()
                ray.get(actor.join.remote(*told), timeout=_ANSWER_S)
                return actor
            except (RayActorError, GetTimeoutError):  # it has just ended, or starts anew elsewhere
                if time.monotonic() > deadline or self._stop.wait(_LOOK_EVERY_S):
                    raise


def _read(node: str, path: str, start: int, end: int) -> bytes | None:
    """A part of a whole file from a node that has it; None if that does not answer."""
    try:
        answer = peer.on(node).read.remote(path, 0, start, end)
        data: bytes | None = ray.get(answer, timeout=_FIRST_READ_S)
    except Exception as error:
        logger.info("Node %s does not give a header: %r.", node[:8], error)
        return None
    return data


def _key(file: RemoteFile, *, is_whole: bool = True) -> str:
    """The same for the same content only; another one for its header alone."""
    content = file.sha256 or (file.name, file.version)
    told = repr((content, file.n_bytes, is_whole)).encode()
    return blake2b(told, digest_size=16).hexdigest()
