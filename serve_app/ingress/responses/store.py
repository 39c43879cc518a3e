"""Keeps responses for some minutes, within bounds for each client.

A kept response is the input that it is made from, and the log of its output so far. Its events and the
response itself are computed from these two, by any ingress. The store is asked by all ingresses, and reads
nothing of what it keeps.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app import msgpack
from serve_app.errors import CorralError, EngineFailedError, KeyLimitError, RateLimitError
from serve_app.types import GenerationRequest, TokenDelta

LEASE_S = 10.0
"""A response that is being made, and that its ingress was silent about for so long, goes on in another."""
ABANDONED_S = 120.0
"""A response that no ingress went on with for so long has failed."""
_RETRY_S = 10
_CHUNK = 64
"""The most events of a chunk: to read so many takes about a millisecond."""


class StoredRequest(msgspec.Struct, frozen=True):
    """The input that a response is made from."""

    id: str
    model: str
    created: int
    """Unix time."""
    is_background: bool
    asked: dict[str, Any]
    """The fields that the response repeats of its request."""
    tools: Sequence[Mapping[str, Any]]
    """The tools as chat templates read them."""
    thinks: bool
    return_progress: bool
    prompt_end: tuple[int, ...]
    """The last tokens of the prompt, which may begin reasoning."""
    items: bytes
    """The conversation that it answers, as a JSON list of items."""
    packed_request: bytes
    """The engine's request, for the ingress that makes the response."""

    def packed(self) -> bytes:
        return msgpack.packed(self)

    @classmethod
    def unpacked(cls, packed: bytes | memoryview) -> StoredRequest:
        """The input that another process packed."""
        return msgspec.msgpack.decode(packed, type=cls)

    @property
    def request(self) -> GenerationRequest:
        return msgspec.msgpack.decode(self.packed_request, type=GenerationRequest)


class Event(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a response's log, which has one last."""

    at: float
    delta: TokenDelta | None = None
    error: CorralError | None = None
    """Neither a delta nor an error: it was cancelled."""

    @property
    def is_last(self) -> bool:
        """Whether that is its end."""
        return self.delta is None or self.delta.end is not None


def packed(events: Sequence[Event]) -> list[bytes]:
    """Pack events as chunks of a log."""
    starts = range(0, len(events), _CHUNK)
    return [msgpack.packed(events[start : start + _CHUNK]) for start in starts]


def unpacked(chunk: bytes | memoryview) -> list[Event]:
    """The events of a chunk, which an ingress has packed."""
    events: list[Event] = msgpack.decoder(list[Event]).decode(chunk)
    return events


def merged(events: Sequence[Event]) -> list[Event]:
    """All deltas as one, and what else is the last of them: a response is the same by these, and sooner."""
    deltas = [event.delta for event in events if event.delta is not None]
    text = "".join(delta.text for delta in deltas)
    first = [Event(events[-1].at, TokenDelta(text, (), deltas[-1].end))] if deltas else []
    return first + [event for event in events[-1:] if event.delta is None]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept, and how long."""

    kept_s: float = 1800.0
    """Seconds after a response's end; 0 keeps none at all."""
    max_each: int = 256
    """Responses of each client."""
    max_bytes_each: int = 16 << 20
    max_bytes: int = 256 << 20
    """The most bytes of all clients."""


@dataclass(frozen=True, slots=True)
class Owner:
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
    """The number of the first chunk."""
    chunks: Sequence[bytes]
    has_ended: bool


class AppendResult(enum.Enum):
    """The store's instruction to the ingress that makes a response."""

    GO_ON = 0
    HURRY = 1
    """Somebody reads the response, and wants news at once."""
    CANCEL = 2
    """Somebody asked for its end."""
    LEAVE = 3
    """The response was deleted, or another ingress makes it."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    stored_request: bytes
    """Packed."""
    chunks: Sequence[bytes]
    """The log from the chunk on that was asked for."""
    has_ended: bool
    turn: int
    owner: Owner


@dataclass
class _ResponseLog:
    owner: Owner
    stored_request: bytes
    chunks: list[bytes]
    has_ended: bool
    turn: int
    touched_at: float
    progressed_at: float
    is_unwanted: bool = False
    read_until: float = float("-inf")
    changes: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def n_bytes(self) -> int:
        return len(self.stored_request) + sum(map(len, self.chunks))

    def changed(self) -> None:
        self.changes.set()
        self.changes = asyncio.Event()

    def since(self, first: int) -> StoredResponse:
        chunks = self.chunks[first:]
        return StoredResponse(self.stored_request, chunks, self.has_ended, self.turn, self.owner)


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
        """Each holder has its own, the oldest first."""
        self._bytes: Counter[str] = Counter()
        """The bytes of each holder's responses."""
        self._expire_at = clock()

    @property
    def keeps_any(self) -> bool:
        return self.bounds.kept_s > 0

    def __len__(self) -> int:
        self._expire()
        return len(self._kept)

    async def prepare(self) -> None: ...

    async def put(self, owner: Owner, stored_request: bytes, log: LogAppend) -> None:
        """Keep a response, its log as far as it is. Raises RateLimitError if too many of its owner's are
        being made, KeyLimitError if it is too large."""
        self._expire()
        now, chunks = self._clock(), list(log.chunks)
        kept = _ResponseLog(owner, stored_request, chunks, log.has_ended, log.turn, now, now)
        if kept.n_bytes > min(self.bounds.max_bytes_each, self.bounds.max_bytes):
            raise KeyLimitError(f"A response of {kept.n_bytes} bytes is too large to be kept.")
        if not log.has_ended:
            self._check_running(owner.holder)
        if log.id in self._kept:
            self._forget(log.id)
        held = self._held.setdefault(owner.holder, {})
        self._kept[log.id] = held[log.id] = kept
        self._bytes[owner.holder] += kept.n_bytes
        for _ in range(len(held) - self.bounds.max_each):
            self._forget_oldest(owner.holder)
        self._make_room(owner.holder)

    def _check_running(self, holder: str) -> None:
        running = [kept for kept in self._held.get(holder, {}).values() if not kept.has_ended]
        too_large = sum(kept.n_bytes for kept in running) >= self.bounds.max_bytes_each
        if len(running) >= self.bounds.max_each or too_large:
            raise RateLimitError(
                f"You have {len(running)} responses in the background, which is the limit.",
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
        if append.chunks and append.first == len(kept.chunks):
            kept.chunks += append.chunks
            self._bytes[kept.owner.holder] += sum(map(len, append.chunks))
            kept.has_ended = append.has_ended
            kept.changed()
            self._make_room(kept.owner.holder)
        if kept.is_unwanted:
            return AppendResult.CANCEL
        is_read = self._clock() < kept.read_until
        return AppendResult.HURRY if is_read else AppendResult.GO_ON

    async def find(
        self, response_id: str, key: str | None, first: int = 0, wait_s: float = 0.0
    ) -> StoredResponse | None:
        """A response of this key's, its log from that chunk on. Waits so long for more, or its end."""
        self._expire()
        kept = self._owned(response_id, key)
        if kept is not None and wait_s:
            kept.read_until = max(kept.read_until, self._clock() + wait_s)
            if len(kept.chunks) <= first and not kept.has_ended:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await kept.changes.wait()
                kept = self._owned(response_id, key)
        return None if kept is None else kept.since(first)

    async def delete(self, response_id: str, key: str | None) -> bool:
        """Forget a response of this key's; its making ends. Returns whether there was one."""
        self._expire()
        if self._owned(response_id, key) is None:
            return False
        self._forget(response_id)
        return True

    async def cancel(self, response_id: str, key: str | None) -> None:
        kept = self._owned(response_id, key)
        if kept is not None:
            kept.is_unwanted = True

    async def adopt(self) -> StoredResponse | None:
        """Be the one that goes on with a response whose ingress is silent; None if there is no such one.
        A response that nobody went on with for long has failed."""
        self._expire()
        for response_id, kept in list(self._kept.items()):
            if kept.has_ended or self._clock() - kept.touched_at < LEASE_S:
                continue
            if self._clock() - kept.progressed_at < ABANDONED_S:
                kept.turn += 1
                kept.touched_at = self._clock()
                return kept.since(0)
            error = EngineFailedError("No replica could continue this response.")
            chunks = packed([Event(time.time(), error=error)])
            self._append(LogAppend(response_id, kept.turn, len(kept.chunks), chunks, True))
        return None

    def _owned(self, response_id: str, key: str | None) -> _ResponseLog | None:
        kept = self._kept.get(response_id)
        if kept is None or kept.owner.key != key or self._is_old(kept):
            return None
        return kept

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

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        holder = kept.owner.holder
        del self._held[holder][response_id]
        self._bytes[holder] -= kept.n_bytes
        if not self._held[holder]:
            del self._held[holder], self._bytes[holder]
        kept.changed()

    def _make_room(self, holder: str) -> None:
        """Keep the bounds on bytes, first those of this holder."""
        while self._bytes[holder] > self.bounds.max_bytes_each and self._forget_oldest(holder):
            pass
        while self._bytes.total() > self.bounds.max_bytes:
            by_size = (name for name, _ in self._bytes.most_common())
            if not any(map(self._forget_oldest, by_size)):
                break  # all that is left is being made

    def _forget_oldest(self, holder: str) -> bool:
        """Forget the holder's oldest that is complete. Returns whether there was one."""
        for response_id, kept in self._held.get(holder, {}).items():
            if kept.has_ended:
                self._forget(response_id)
                return True
        return False
