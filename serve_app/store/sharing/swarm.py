"""The pieces of one file: which node has which, and fetches which one from where. Without effects.

A piece leaves the origin once: it is leased to one node, and the others have it from that node. A lease
ends without progress, so a node that dies costs only time. Pieces that few nodes have are copied first, as
in BitTorrent ("rarest first"): what a node takes with it when it dies is little then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from zlib import crc32

from serve_app.store.pieces import Take

LEASE_S = 20.0
"""A lease ends after so long without progress."""
N_FROM_ORIGIN = 2
"""A node fetches so many pieces from the origin before it takes those of other nodes, too."""
N_UPLOADS = 4
"""So many pieces leave one node at once."""
AVOID_S = 60.0
"""A node is not asked again for so long by one that it failed,"""
CUT_OFF_S = 120.0
"""and so long a node that could not reach the origin leaves that to others."""
_SLOW = 4.0
"""A piece that takes so many times as long as others did may be fetched a second time,"""
_SLOW_S = 20.0
"""but not before that."""
_LATEST = 0.2
"""The weight of the latest piece in the mean."""


@dataclass(slots=True)
class _Lease:
    node: str
    holder: str | None
    began: float
    seen: float


class Swarm:
    """The nodes that want or have one file. `now` is in seconds, of a clock that never goes back."""

    def __init__(self, n_pieces: int) -> None:
        self._n = n_pieces
        self._paths: dict[str, str] = {}
        self._have: dict[str, bytearray] = {}
        self._copies = [0] * n_pieces
        self._leases: dict[tuple[str, int], _Lease] = {}
        self._seen: dict[str, float] = {}
        """The nodes that fetch, and when they were heard of."""
        self._avoided: dict[tuple[str, str], float] = {}
        self._cut_off: dict[str, float] = {}
        self._piece_s: float | None = None

    def join(self, node: str, path: str, have: bytes, fetching: Iterable[int], now: float) -> None:
        """A node fetches the file, has those pieces, and is fetching some from the origin already."""
        self.forget(node)
        self._paths[node], self._have[node] = path, bytearray(have)
        self._seen[node] = now
        for piece, there in enumerate(have):
            self._copies[piece] += there
        for piece in fetching:
            self._leases[node, piece] = _Lease(node, None, now, now)

    def hold(self, node: str, path: str) -> None:
        """A node has the whole file, unless it is known to be fetching it."""
        if node in self._seen or 0 not in self._have.get(node, b"\0"):
            return
        self.forget(node)
        self._paths[node], self._have[node] = path, bytearray(b"\1" * self._n)
        self._copies = [n + 1 for n in self._copies]

    def forget(self, node: str) -> None:
        """It has nothing and wants nothing."""
        self.leave(node)
        self._paths.pop(node, None)
        for piece, there in enumerate(self._have.pop(node, b"")):
            self._copies[piece] -= there

    def leave(self, node: str) -> None:
        """It fetches no more, but has what it has."""
        self._seen.pop(node, None)
        for key in [key for key, lease in self._leases.items() if lease.node == node]:
            del self._leases[key]

    def is_member(self, node: str) -> bool:
        """Whether it has joined, and neither left nor been forgotten since."""
        return node in self._seen

    def is_active(self, now: float) -> bool:
        """Whether anybody fetches it."""
        return any(now - seen < LEASE_S for seen in self._seen.values())

    def next(self, node: str, getting: Collection[int], now: float) -> Take | None:
        """The next piece for a member that is getting these already; None if it can have none now."""
        self._seen[node] = now
        self._expire(now)
        wanted = [
            piece
            for piece, there in enumerate(self._have[node])
            if not there and piece not in getting and (node, piece) not in self._leases
        ]
        take = self._chosen(node, wanted, now)
        if take is not None:
            self._leases[node, take.piece] = _Lease(node, take.node, now, now)
        return take

    def _chosen(self, node: str, wanted: list[int], now: float) -> Take | None:
        leased = {piece for _, piece in self._from_origin()}
        usable = [other for other in self._paths if self._serves(node, other, now)]
        unknown = [
            piece
            for piece in wanted
            if piece not in leased
            and not (self._copies[piece] and any(self._have[one][piece] for one in usable))
        ]
        n_own = sum(one == node for one, _ in self._from_origin())
        may = now >= self._cut_off.get(node, now)
        # What nobody else has is lost with a node: such pieces are copied before there are more of them.
        n_rare = sum(n == 1 for n in self._copies)
        if may and unknown and n_own < N_FROM_ORIGIN and n_rare < len(self._seen):
            return Take(unknown[0], is_last_resort=False)
        copied = self._copied(node, wanted, usable)
        if copied is not None:
            return copied
        if may and unknown:
            return Take(unknown[0], is_last_resort=False)
        if may:
            slow = next((one for one in wanted if one in leased and self._is_slow(one, now)), None)
            return None if slow is None else Take(slow, is_last_resort=False)
        if unknown and not self._others_fetch(node, now):
            return Take(unknown[0], is_last_resort=True)
        return None

    def _copied(self, node: str, wanted: list[int], usable: list[str]) -> Take | None:
        """A piece that another node has: one of the rarest, from the node that has the least to do."""
        n_uploads = Counter(lease.holder for lease in self._leases.values())
        free = sorted(
            (one for one in usable if n_uploads[one] < N_UPLOADS), key=lambda one: n_uploads[one]
        )
        first = crc32(node.encode()) % self._n  # nodes begin at different ones
        for piece in sorted(wanted, key=lambda one: (self._copies[one], (one - first) % self._n)):
            for holder in free if self._copies[piece] else ():
                if self._have[holder][piece]:
                    return Take(piece, holder, self._paths[holder], is_last_resort=False)
        return None

    def _serves(self, node: str, other: str, now: float) -> bool:
        return other != node and now >= self._avoided.get((node, other), now)

    def _others_fetch(self, node: str, now: float) -> bool:
        """Whether another node may have the rest some time."""
        return any(
            other != node and now - seen < LEASE_S and now >= self._cut_off.get(other, now)
            for other, seen in self._seen.items()
        )

    def _from_origin(self) -> Iterator[tuple[str, int]]:
        return (key for key, lease in self._leases.items() if lease.holder is None)

    def _is_slow(self, piece: int, now: float) -> bool:
        """Whether everybody who fetches it from the origin takes too long."""
        if self._piece_s is None:
            return False
        longest = max(_SLOW_S, _SLOW * self._piece_s)
        return all(
            now - lease.began > longest
            for (_, one), lease in self._leases.items()
            if one == piece and lease.holder is None
        )

    def renew(self, node: str, piece: int, now: float) -> None:
        """Some of a piece has come."""
        if node in self._seen:
            self._seen[node] = now
        if (lease := self._leases.get((node, piece))) is not None:
            lease.seen = now

    def done(self, node: str, piece: int, now: float) -> None:
        """A node has a piece."""
        if (lease := self._leases.pop((node, piece), None)) is not None and lease.holder is None:
            latest, before = now - lease.began, self._piece_s
            self._piece_s = latest if before is None else before + _LATEST * (latest - before)
            self._cut_off.pop(node, None)
        if node in self._have and not self._have[node][piece]:
            self._have[node][piece] = 1
            self._copies[piece] += 1

    def failed(self, node: str, piece: int, holder: str | None, now: float) -> None:
        """A node did not get a piece from another one, or from the origin."""
        self._leases.pop((node, piece), None)
        if holder is None:
            self._cut_off[node] = now + CUT_OFF_S
        else:
            self._avoided[node, holder] = now + AVOID_S

    def _expire(self, now: float) -> None:
        for key in [key for key, one in self._leases.items() if now - one.seen >= LEASE_S]:
            del self._leases[key]
