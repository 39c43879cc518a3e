"""Keeps responses for some minutes, within bounds for each client.

A kept response is the input that it is made from, and the log of its output so far. Its events and the
response itself are computed from these two, by any ingress. The store is asked by all ingresses, and reads
nothing of what it keeps.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from serve_app.base.errors import CorralError, EngineFailedError, KeyLimitError, RateLimitError
from serve_app.base.values.answers import TokenDelta
from serve_app.channel import msgpack

LEASE_S = 10.0
"""A response that is being made, and that its ingress is silent about for so long, has failed."""
MAX_EACH = 256
"""Most responses of each client."""
MAX_BYTES_EACH, MAX_BYTES = 16 << 20, 256 << 20
"""The most bytes of each client, and of all together."""
ITEM_BYTES = 256
"""About what it takes to find an item by its id."""
_RETRY_S = 10
_CHUNK = 64
"""The most events of a chunk: to read so many takes about a millisecond."""


_PREFIX_CHARS = 24


def item_prefix(response_id: str) -> str:
    """The text that the ids of a response's own items have behind their kind. It does not tell the
    response's id."""
    return hashlib.blake2b(response_id.encode(), digest_size=_PREFIX_CHARS // 2).hexdigest()


def prefix_in(item_id: str) -> str:
    """The prefix in the id of an item, if that is a response's own."""
    return item_id.partition("_")[2][:_PREFIX_CHARS]


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
    item_ids: Sequence[str]
    """The ids of these."""
    later_tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the conversation makes known, as `asked` has others."""

    def pack(self) -> bytes:
        return msgpack.encode(self)

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> StoredRequest:
        """The input that another process packed."""
        return msgspec.msgpack.decode(packed, type=cls)


class Event(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a response's log, which has one last."""

    at: float
    delta: TokenDelta | None = None
    error: CorralError | None = None
    """An entry with neither a delta nor an error: it was cancelled."""

    @classmethod
    def wait(cls) -> Event:
        """The entry that says that nothing came for long."""
        return cls(time.time(), TokenDelta("", ()))

    @property
    def is_wait(self) -> bool:
        """Whether nothing came."""
        return self.delta == TokenDelta("", ())

    @property
    def is_last(self) -> bool:
        """Whether that is its end."""
        return self.delta is None or self.delta.end is not None


def pack_events(events: Sequence[Event]) -> list[bytes]:
    """Pack events as chunks of a log."""
    starts = range(0, len(events), _CHUNK)
    return [msgpack.encode(events[start : start + _CHUNK]) for start in starts]


def unpack_events(chunk: bytes | memoryview) -> list[Event]:
    """The events of a chunk, which an ingress has packed."""
    events: list[Event] = msgpack.decoder(list[Event]).decode(chunk)
    return events


def merge(events: Sequence[Event]) -> list[Event]:
    """All deltas as one, and what else is the last of them: a response is the same by these, and sooner."""
    deltas = [event.delta for event in events if event.delta is not None]
    text = "".join(delta.text for delta in deltas)
    first = [Event(events[-1].at, TokenDelta(text, (), deltas[-1].end))] if deltas else []
    return first + [event for event in events[-1:] if event.delta is None]


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
    first: int
    """The number of the first chunk."""
    chunks: Sequence[bytes]
    has_ended: bool


@dataclass(frozen=True, slots=True)
class StoredResponse:
    stored_request: bytes
    """Packed."""
    chunks: Sequence[bytes]
    """The log from the chunk on that was asked for."""
    has_ended: bool


class ResponseStore(Protocol):
    """The place where responses are kept. All ingresses of an application have the same one."""

    is_shared: bool
    """Whether it outlives an ingress."""

    async def prepare(self) -> None:
        """Be ready for a response that will be kept. Raises nothing."""

    async def put(
        self,
        owner: Owner,
        stored_request: bytes,
        log: LogAppend,
        kept_s: float,
        item_ids: Sequence[str] = (),
    ) -> None:
        """Keep a response, its log as far as it is, until so many seconds after its end. It is found by the
        ids of the items that it answers, too, and by those of its own. Raises RateLimitError if too many of
        its owner's are being made, KeyLimitError if it is too large, and ConnectionError if the store is
        lost."""

    async def append(self, appends: Sequence[LogAppend]) -> list[bool]:
        """Add to the logs of responses that are being made. Returns which of them go on: the others were
        cancelled, deleted or lost. An empty addition is a sign of life. Raises ConnectionError if the store
        does not answer."""

    async def find(
        self, response_id: str, key: str | None, first: int = 0, wait_s: float = 0.0
    ) -> StoredResponse | None:
        """A response of this key's, its log from that chunk on. Waits so long for more, or its end."""

    async def find_items(
        self, item_ids: Sequence[str], key: str | None
    ) -> list[StoredResponse] | None:
        """The newest responses of this key's with these items, from the last item on up to one that is not
        kept. Raises KeyLimitError if they are too large together."""

    async def delete(self, response_id: str, key: str | None) -> bool | None:
        """Forget a response of this key's; its making ends. Returns whether there was one."""

    async def cancel(self, response_id: str, key: str | None) -> None:
        """End a response of this key's, unless it has ended."""


@dataclass
class _ResponseLog:
    owner: Owner
    stored_request: bytes
    chunks: list[bytes]
    has_ended: bool
    kept_s: float
    touched_at: float
    item_ids: Sequence[str]
    changes: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def n_bytes(self) -> int:
        n_ids = ITEM_BYTES * len(self.item_ids)
        return len(self.stored_request) + sum(map(len, self.chunks)) + n_ids

    def tell(self, first: int = 0) -> StoredResponse:
        """The part that others read of it, its log from that chunk on."""
        return StoredResponse(self.stored_request, self.chunks[first:], self.has_ended)


class Store:
    """A ResponseStore in memory. For one event loop.

    A client that has too many loses its oldest; where all of them take too much, who has most does.
    A response that is being made is never dropped.
    """

    is_shared = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, _ResponseLog] = {}
        """The oldest first."""
        self._held: dict[str, dict[str, _ResponseLog]] = {}
        """The responses of each holder, the oldest first."""
        self._by_item: dict[str, list[str]] = {}
        """The responses with an item, the newest last, by its id. For each one's own items, the prefix of
        their ids stands."""
        self._bytes: Counter[str] = Counter()
        """The bytes of each holder's responses."""
        self._look_at = clock()

    def __len__(self) -> int:
        self._look()
        return len(self._kept)

    async def prepare(self) -> None: ...

    async def put(
        self,
        owner: Owner,
        stored_request: bytes,
        log: LogAppend,
        kept_s: float,
        item_ids: Sequence[str] = (),
    ) -> None:
        self._look()
        if log.id in self._kept:  # it came before, and the answer was lost
            return
        chunks = list(log.chunks)
        entry = _ResponseLog(
            owner, stored_request, chunks, log.has_ended, kept_s, self._clock(), item_ids
        )
        if entry.n_bytes > MAX_BYTES_EACH:
            raise KeyLimitError(f"A response of {entry.n_bytes} bytes is too large to be kept.")
        if not log.has_ended:
            self._check_running(owner.holder)
        held = self._held.setdefault(owner.holder, {})
        self._kept[log.id] = held[log.id] = entry
        for item_id in (*item_ids, item_prefix(log.id)):
            self._by_item.setdefault(item_id, []).append(log.id)
        self._bytes[owner.holder] += entry.n_bytes
        for _ in range(len(held) - MAX_EACH):
            self._forget_oldest(owner.holder)
        self._make_room(owner.holder)

    def _check_running(self, holder: str) -> None:
        running = [kept for kept in self._held.get(holder, {}).values() if not kept.has_ended]
        too_large = sum(kept.n_bytes for kept in running) >= MAX_BYTES_EACH
        if len(running) >= MAX_EACH or too_large:
            raise RateLimitError(
                f"You have {len(running)} responses in the background, which is the limit.",
                _RETRY_S,
            )

    async def append(self, appends: Sequence[LogAppend]) -> list[bool]:
        self._look()
        return [self._append(append) for append in appends]

    def _append(self, append: LogAppend) -> bool:
        entry = self._kept.get(append.id)
        if entry is None or entry.has_ended:
            return False
        entry.touched_at = self._clock()
        if append.chunks and append.first == len(entry.chunks):
            self._extend(entry, append.chunks, has_ended=append.has_ended)
        return True

    def _extend(self, entry: _ResponseLog, chunks: Sequence[bytes], *, has_ended: bool) -> None:
        entry.chunks += chunks
        entry.has_ended = has_ended
        self._bytes[entry.owner.holder] += sum(map(len, chunks))
        _wake(entry)
        self._make_room(entry.owner.holder)

    async def find(
        self, response_id: str, key: str | None, first: int = 0, wait_s: float = 0.0
    ) -> StoredResponse | None:
        entry = self._find_log(response_id, key)
        if entry is not None and wait_s and len(entry.chunks) <= first and not entry.has_ended:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await entry.changes.wait()
            entry = self._find_log(response_id, key)
        return None if entry is None else entry.tell(first)

    async def find_items(self, item_ids: Sequence[str], key: str | None) -> list[StoredResponse]:
        logs: dict[str, _ResponseLog] = {}
        for item_id in reversed(item_ids):
            names = self._names_by_item(item_id)
            if any(name in logs for name in names):
                continue
            newest = next((name for name in names if self._find_log(name, key)), None)
            if newest is None:
                break
            logs[newest] = self._kept[newest]
        if sum(log.n_bytes for log in logs.values()) > MAX_BYTES_EACH:
            raise KeyLimitError("The responses with these items are too large together.")
        return [log.tell() for log in logs.values()]

    def _names_by_item(self, item_id: str) -> list[str]:
        """The responses with this item, the newest first."""
        own = self._by_item.get(prefix_in(item_id), ())
        return [*own, *self._by_item.get(item_id, ())][::-1]

    async def delete(self, response_id: str, key: str | None) -> bool:
        if self._find_log(response_id, key) is None:
            return False
        self._forget(response_id)
        return True

    async def cancel(self, response_id: str, key: str | None) -> None:
        kept = self._find_log(response_id, key)
        if kept is not None and not kept.has_ended:
            self._extend(kept, pack_events([Event(time.time())]), has_ended=True)

    def _find_log(self, response_id: str, key: str | None) -> _ResponseLog | None:
        self._look()
        kept = self._kept.get(response_id)
        if kept is None or kept.owner.key != key or self._is_old(kept):
            return None
        return kept

    def _is_old(self, kept: _ResponseLog) -> bool:
        return kept.has_ended and self._clock() - kept.touched_at >= kept.kept_s

    def _look(self) -> None:
        """Forget what has been kept long enough, and end what its ingress is silent about. That looks at
        all, so it is done once a second."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + 1.0
        for response_id in [name for name, entry in self._kept.items() if self._is_old(entry)]:
            self._forget(response_id)
        running = [entry for entry in self._kept.values() if not entry.has_ended]
        for entry in running:
            if now - entry.touched_at >= LEASE_S:
                entry.touched_at = now
                error = EngineFailedError("The process that made this response has ended.")
                self._extend(entry, pack_events([Event(time.time(), error=error)]), has_ended=True)

    def _forget(self, response_id: str) -> None:
        entry = self._kept.pop(response_id)
        holder = entry.owner.holder
        del self._held[holder][response_id]
        for item_id in (*entry.item_ids, item_prefix(response_id)):
            names = self._by_item[item_id]
            names.remove(response_id)
            if not names:
                del self._by_item[item_id]
        self._bytes[holder] -= entry.n_bytes
        if not self._held[holder]:
            del self._held[holder], self._bytes[holder]
        _wake(entry)

    def _make_room(self, holder: str) -> None:
        """Keep the bounds on bytes, first those of this holder."""
        while self._bytes[holder] > MAX_BYTES_EACH and self._forget_oldest(holder):
            pass
        while self._bytes.total() > MAX_BYTES:
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


def _wake(kept: _ResponseLog) -> None:
    """Have all go on who wait for news of a response."""
    kept.changes.set()
    kept.changes = asyncio.Event()
