"""Keeps responses for some minutes, within bounds for each client.

It is asked by all ingresses, and reads nothing of what it keeps.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from serve_app.errors import EngineFailedError, KeyLimitError, RateLimitError
from serve_app.ingress.responses import log
from serve_app.ingress.responses.log import Event

LEASE_S = 10.0
"""A response that is being made, and that its ingress was silent about for so long, goes on in another."""
ABANDONED_S = 120.0
"""A response that no ingress went on with for so long has failed."""
_RETRY_S = 10


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept, and how long."""

    kept_s: float = 1800.0
    """Seconds after a response's end; 0 keeps none at all."""
    max_each: int = 256
    """Responses of each client."""
    max_bytes_each: int = 16 << 20
    """The most bytes of each client."""
    max_bytes: int = 256 << 20
    """The most bytes of all clients."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a response."""

    key: str | None
    """The name of the API key that alone may read it; None without keys: who knows its id may."""
    holder: str
    """The client that it counts for: the key, or without keys, an address."""


@dataclass(frozen=True, slots=True)
class LogAppend:
    """New output of a response, for its log."""

    id: str
    turn: int
    """How many ingresses went on with it before."""
    first: int
    """The place of the first entry."""
    entries: bytes
    """Packed."""
    n: int
    """How many they are."""
    has_ended: bool


class AppendResult(enum.Enum):
    """The store's instruction to the ingress that makes a response."""

    GO_ON = 0
    CANCEL = 1
    """Somebody asked for its end."""
    LEAVE = 2
    """The response was deleted, or another ingress makes it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The stored record of a response."""

    stored_request: bytes
    """Packed."""
    packs: Sequence[tuple[int, bytes]]
    """Packed entries, each pack with the place of its first one; some may be from before that place."""
    n_entries: int
    """How many there are in all."""
    has_ended: bool
    turn: int
    owner: Owner

    def parts(self, since: int = 0) -> Iterator[Sequence[Event]]:
        """The entries from that place on, some at a time. None is empty."""
        for first, pack in self.packs:
            place = first
            for part in log.unpacked(pack):
                if new := part[max(0, since - place) :]:
                    yield new
                place += len(part)

    def entries(self, since: int = 0) -> list[Event]:
        """The entries from that place on."""
        return [entry for part in self.parts(since) for entry in part]


@dataclass
class _ResponseLog:
    owner: Owner
    stored_request: bytes
    packs: list[tuple[int, bytes]]
    n_entries: int
    has_ended: bool
    touched_at: float
    turn: int = 0
    is_unwanted: bool = False
    progressed_at: float = 0.0
    changes: asyncio.Event = field(default_factory=asyncio.Event)
    n_bytes: int = 0

    def changed(self) -> None:
        """Wake all who wait."""
        self.changes.set()
        self.changes = asyncio.Event()

    def found(self, since: int) -> StoredResponse:
        ends = [*(first for first, _ in self.packs[1:]), self.n_entries]
        packs = [pack for pack, end in zip(self.packs, ends, strict=False) if end > since]
        return StoredResponse(
            self.stored_request, packs, self.n_entries, self.has_ended, self.turn, self.owner
        )


class Store:
    """Keeps responses in memory. For one event loop.

    A client that has too many loses its oldest; where all of them take too much, who has most does.
    A response that is being made is never dropped.
    """

    def __init__(self, bounds: Bounds, clock: Callable[[], float] = time.monotonic) -> None:
        self.bounds = bounds
        self._clock = clock
        self._kept: dict[str, _ResponseLog] = {}
        """The oldest first."""
        self._held: dict[str, dict[str, _ResponseLog]] = {}
        """The logs by holder."""
        self._bytes: Counter[str] = Counter()
        """The bytes of each holder's responses."""
        self._n_bytes = 0
        self._expire_at = clock()

    @property
    def keeps_any(self) -> bool:
        """Whether responses are kept at all."""
        return self.bounds.kept_s > 0

    def __len__(self) -> int:
        self._expire()
        return len(self._kept)

    async def prepare(self) -> None:
        """Be ready to keep a response soon."""

    async def put(
        self, response_id: str, owner: Owner, stored_request: bytes, append: LogAppend
    ) -> None:
        """Keep a response, its log as far as it is. Raises RateLimitError if too many of its owner's are
        being made, KeyLimitError if it is too large."""
        self._expire()
        n_bytes = len(stored_request) + len(append.entries)
        if n_bytes > min(self.bounds.max_bytes_each, self.bounds.max_bytes):
            raise KeyLimitError(f"A response of {n_bytes} bytes is too large to be kept.")
        if not append.has_ended:
            self._check_running(owner)
        now = self._clock()
        packs = [(append.first, append.entries)] if append.n else []
        kept = _ResponseLog(
            owner,
            stored_request,
            packs,
            append.n,
            append.has_ended,
            now,
            append.turn,
            progressed_at=now,
        )
        if response_id in self._kept:
            self._forget(response_id)
        self._kept[response_id] = kept
        self._held.setdefault(owner.holder, {})[response_id] = kept
        self._grow(kept, n_bytes)
        self._make_room(owner.holder)

    def _check_running(self, owner: Owner) -> None:
        of_owner = [one for one in self._of(owner.holder) if not one.has_ended]
        most = self.bounds.max_each
        too_large = sum(one.n_bytes for one in of_owner) >= self.bounds.max_bytes_each
        if len(of_owner) >= most or too_large:
            raise RateLimitError(
                f"You have {len(of_owner)} responses in the background, which is the limit.",
                _RETRY_S,
            )

    async def append(self, appends: Sequence[LogAppend]) -> list[AppendResult]:
        """Add to the logs of responses that are being made. An empty addition is a sign of life."""
        self._expire()
        return [self._append(append) for append in appends]

    def _append(self, append: LogAppend) -> AppendResult:
        kept = self._kept.get(append.id)
        if kept is None or kept.turn != append.turn or kept.has_ended:
            return AppendResult.LEAVE
        kept.touched_at = kept.progressed_at = self._clock()
        if append.n and append.first == kept.n_entries:
            kept.packs.append((append.first, append.entries))
            kept.n_entries += append.n
            self._grow(kept, len(append.entries))
            kept.has_ended = append.has_ended
            kept.changed()
            self._make_room(kept.owner.holder)
        return AppendResult.CANCEL if kept.is_unwanted else AppendResult.GO_ON

    async def find(
        self, response_id: str, key: str | None, since: int = 0, wait_s: float = 0.0
    ) -> StoredResponse | None:
        """A response of this key's, its log from that place on. Waits for so many seconds until there is
        something, or the end."""
        self._expire()
        kept = self._owned(response_id, key)
        if kept is not None and wait_s and kept.n_entries <= since and not kept.has_ended:
            try:
                async with asyncio.timeout(wait_s):
                    await kept.changes.wait()
            except TimeoutError:
                pass
            kept = self._owned(response_id, key)
        return None if kept is None else kept.found(since)

    async def delete(self, response_id: str, key: str | None) -> bool:
        """Forget a response of this key's; its making ends. Returns whether there was one."""
        self._expire()
        if self._owned(response_id, key) is None:
            return False
        self._forget(response_id)
        return True

    async def cancel(self, response_id: str, key: str | None) -> None:
        """Have the making of a response end."""
        kept = self._owned(response_id, key)
        if kept is not None:
            kept.is_unwanted = True

    async def adopt(self, response_id: str) -> StoredResponse | None:
        """Be the one that goes on with a response whose ingress is gone; None if somebody else does."""
        kept = self._kept.get(response_id)
        if kept is None or kept.has_ended or not self._is_orphan(kept):
            return None
        kept.turn += 1
        kept.touched_at = self._clock()
        return kept.found(0)

    def orphans(self) -> list[str]:
        """The ids of responses whose ingress is silent. Those that nobody went on with for long have
        failed."""
        self._expire()
        orphans = [(i, one) for i, one in self._kept.items() if self._is_orphan(one)]
        for response_id, kept in orphans:
            if self._clock() - kept.progressed_at >= ABANDONED_S:
                error = EngineFailedError("No replica could continue this response.")
                entries = log.packed([Event(error, time.time())])
                self._append(LogAppend(response_id, kept.turn, kept.n_entries, entries, 1, True))
        return [response_id for response_id, kept in orphans if not kept.has_ended]

    @property
    def n_running(self) -> int:
        """Responses that are being made."""
        return sum(not one.has_ended for one in self._kept.values())

    def _is_orphan(self, kept: _ResponseLog) -> bool:
        return not kept.has_ended and self._clock() - kept.touched_at >= LEASE_S

    def _owned(self, response_id: str, key: str | None) -> _ResponseLog | None:
        kept = self._kept.get(response_id)
        if kept is None or kept.owner.key != key or self._is_old(kept):
            return None
        return kept

    def _of(self, holder: str) -> Iterable[_ResponseLog]:
        return self._held.get(holder, {}).values()

    def _is_old(self, kept: _ResponseLog) -> bool:
        return kept.has_ended and self._clock() - kept.touched_at >= self.bounds.kept_s

    def _expire(self) -> None:
        """Forget what has been kept long enough; once a second, as that looks at all."""
        if self._clock() < self._expire_at:
            return
        self._expire_at = self._clock() + 1.0
        for response_id, kept in list(self._kept.items()):
            if self._is_old(kept):
                self._forget(response_id)

    def _grow(self, kept: _ResponseLog, n_bytes: int) -> None:
        kept.n_bytes += n_bytes
        self._bytes[kept.owner.holder] += n_bytes
        self._n_bytes += n_bytes

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        holder = kept.owner.holder
        self._grow(kept, -kept.n_bytes)
        del self._held[holder][response_id]
        if not self._held[holder]:
            del self._held[holder], self._bytes[holder]
        kept.changed()

    def _make_room(self, holder: str) -> None:
        """Keep the bounds, first those of this holder."""
        bounds = self.bounds
        while (
            len(self._held.get(holder, ())) > bounds.max_each
            or self._bytes[holder] > bounds.max_bytes_each
        ) and self._forget_oldest(holder):
            pass
        while self._n_bytes > bounds.max_bytes:
            by_size = (name for name, _ in self._bytes.most_common())
            if not any(self._forget_oldest(name) for name in by_size):
                break  # all that is left is being made

    def _forget_oldest(self, holder: str) -> bool:
        """Whether there was one that is complete."""
        for response_id, kept in self._held.get(holder, {}).items():
            if kept.has_ended:
                self._forget(response_id)
                return True
        return False
