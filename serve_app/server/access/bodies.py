"""Receives the bytes of bodies within bounds: how large, how slow, how many at once, how much in all.

A body stays in the pieces in which it came: to join them, the event loop would copy megabytes at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from serve_app.base.errors import (
    BodyEndedError,
    RateLimitError,
    RequestTooLargeError,
    SlowRequestError,
)
from serve_app.config.schema import IngressConfig
from serve_app.server.workers.worker import MAX_BODY_BYTES

BODY_TIMEOUT_S = 60.0
"""Longest time that a body may take to arrive."""
PROGRESS_S = 5.0
"""The seconds in which a body ends, or brings at least `BodyLimits.min_rate` bytes for each of them."""
_PIECE_BYTES = 64 * 2**10
"""Smaller pieces are joined to such ones: a client may send a byte at a time, and each takes fifty."""
# Bytes that a body is taken to have from the start, so that young ones are not the slowest.
_HEAD_START = 4096


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of one ingress replica."""

    max_open: int = 125
    """Bodies that are being read at once."""
    max_open_bytes: int = 64 * 2**20
    """The most bytes that they have in memory together."""
    min_rate: int = 500
    """Bytes a second."""
    max_each: int | None = None
    """Bodies of one client that are being read at once."""
    max_bytes: int = MAX_BODY_BYTES
    timeout_s: float = BODY_TIMEOUT_S

    @classmethod
    def of(cls, config: IngressConfig) -> BodyLimits:
        """Limits for an ingress: an eighth of its requests may be sending their bodies."""
        return cls(max(1, config.max_ongoing_requests // 8))


@dataclass(eq=False, slots=True)
class _Body:
    client: str
    began: float
    timer: asyncio.Timeout
    n_due: int
    """Bytes that must come before the timer ends."""
    n_bytes: int = 0
    n_kept: int = 0
    """Bytes that are in memory."""
    refusal: str = ""
    """Why it was ended. No error, as its traceback would refer to this: all would stay until the garbage
    collector comes by."""
    _pieces: list[bytes] = field(default_factory=list)
    _last: bytearray = field(default_factory=bytearray)

    def add(self, piece: bytes) -> None:
        self.n_kept += len(piece)
        if not self._last and len(piece) >= _PIECE_BYTES:
            self._pieces.append(piece)
            return
        self._last += piece
        if len(self._last) >= _PIECE_BYTES:
            self._pieces.append(bytes(self._last))
            self._last.clear()

    def drop(self) -> None:
        self._pieces, self._last = [], bytearray()

    def pieces(self) -> list[bytes]:
        return [*self._pieces, bytes(self._last)] if self._last else self._pieces

    def slowness(self, now: float) -> float:
        """Seconds for each byte."""
        return (now - self.began) / (self.n_bytes + _HEAD_START)


class BodyReader:
    """Reads bodies for one event loop.

    When too many are open, the slowest one of the client that has most is ended. When they have too many
    bytes, it is the largest of the client that has most bytes. So who sends as others do is never refused
    for those who do not."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._open: set[_Body] = set()
        self._n_kept = 0

    async def read(self, client: str, headers: Headers, receive: Receive) -> list[bytes] | None:
        """The pieces of the body of that client's request; None if the client has left. Raises
        RequestTooLargeError, SlowRequestError, or BodyEndedError if others need the room."""
        async with self._track(client, headers) as body:
            while (message := await _receive(receive))["type"] != "http.disconnect":
                self._keep(body, message.get("body", b""))
                if not message.get("more_body", False):
                    return body.pieces()
        return None

    async def stream(
        self,
        client: str,
        headers: Headers,
        receive: Receive,
        take: Callable[[bytes], Awaitable[None]],
    ) -> bool:
        """Hand each piece of the body to `take`, and keep none. False if the client has left. Raises the
        same errors, and RateLimitError if the client sends too many at once."""
        async with self._track(client, headers) as body:
            while (message := await _receive(receive))["type"] != "http.disconnect":
                piece = message.get("body", b"")
                self._count(body, len(piece))
                await take(piece)
                if not message.get("more_body", False):
                    return True
        return False

    @asynccontextmanager
    async def _track(self, client: str, headers: Headers) -> AsyncIterator[_Body]:
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._limits.max_bytes:
            raise self._too_large()
        most = self._limits.max_each
        if most is not None and sum(body.client == client for body in self._open) >= most:
            raise RateLimitError(f"You are sending {most} of these at once, which is the limit.", 1)
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(now + PROGRESS_S) as timer:
                body = _Body(client, now, timer, self._n_due)
                self._open.add(body)
                try:
                    self._bound_number(now)
                    yield body
                finally:
                    self._forget(body)
        except TimeoutError:
            raise _end_error(body) if body.refusal else self._too_slow() from None

    def _keep(self, body: _Body, piece: bytes) -> None:
        self._count(body, len(piece))
        body.add(piece)
        self._n_kept += len(piece)
        self._bound_bytes()
        if body.refusal:
            raise _end_error(body)

    def _count(self, body: _Body, n_bytes: int) -> None:
        if body.refusal:
            raise _end_error(body)
        body.n_bytes += n_bytes
        if body.n_bytes > self._limits.max_bytes:
            raise self._too_large()
        body.n_due -= n_bytes
        if body.n_due <= 0:
            body.n_due = self._n_due
            now = asyncio.get_running_loop().time()
            body.timer.reschedule(min(now + PROGRESS_S, body.began + self._limits.timeout_s))

    @property
    def _n_due(self) -> int:
        return max(1, round(self._limits.min_rate * PROGRESS_S))

    def _bound_number(self, now: float) -> None:
        if len(self._open) <= self._limits.max_open:
            return
        held = Counter(body.client for body in self._open)
        slowest = max(self._open, key=lambda body: (held[body.client], body.slowness(now)))
        self._end(slowest, f"{self._limits.max_open} bodies", "the slowest")

    def _bound_bytes(self) -> None:
        while self._n_kept > self._limits.max_open_bytes:
            held = Counter[str]()
            for body in self._open:
                held[body.client] += body.n_kept
            largest = max(self._open, key=lambda body: (held[body.client], body.n_kept))
            self._end(largest, f"{self._limits.max_open_bytes} bytes", "the largest")

    def _end(self, body: _Body, most: str, which: str) -> None:
        body.refusal = (
            f"This server reads {most} at once. There were more, and this one was {which} of the client "
            "that had most. Send fewer at once, or faster."
        )
        self._forget(body)
        if not body.timer.expired():
            body.timer.reschedule(body.began)  # which is over: its task goes on at once

    def _forget(self, body: _Body) -> None:
        if body in self._open:
            self._open.remove(body)
            self._n_kept -= body.n_kept
            body.drop()

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(f"The body has more than {self._limits.max_bytes} bytes.")

    def _too_slow(self) -> SlowRequestError:
        return SlowRequestError(
            f"The body came too slowly. Send at least {self._n_due} bytes in each {PROGRESS_S:.0f} seconds "
            f"and all of it within {self._limits.timeout_s:.0f} seconds."
        )


def _end_error(body: _Body) -> BodyEndedError:
    return BodyEndedError(body.refusal, 1)


async def _receive(receive: Receive) -> Message:
    try:
        return await receive()
    except Exception:  # Serve's way to say that the client left before it had sent all
        return {"type": "http.disconnect"}


Endpoint = TypeVar("Endpoint", bound=Callable[..., object])
_UNREAD, _STREAMED = object(), object()


def mark_unread(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that does not look at bodies: none is received for it, however large."""
    setattr(endpoint, "body_mark", _UNREAD)  # noqa: B010  # functions have no such attribute
    return endpoint


def mark_streamed(endpoint: Endpoint) -> Endpoint:
    """Mark an endpoint that reads the body itself as it comes, within bounds of its own."""
    setattr(endpoint, "body_mark", _STREAMED)  # noqa: B010
    return endpoint


def is_unread(endpoint: object) -> bool:
    return getattr(endpoint, "body_mark", None) is _UNREAD


def is_streamed(endpoint: object) -> bool:
    return getattr(endpoint, "body_mark", None) is _STREAMED


def replay(pieces: Sequence[bytes], receive: Receive) -> Receive:
    """First the body, which is not kept, then that the client leaves: what else it sends is dropped."""
    left = deque(pieces or [b""])

    async def receive_again() -> Message:
        if left:
            piece = left.popleft()
            return {"type": "http.request", "body": piece, "more_body": bool(left)}
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return receive_again
