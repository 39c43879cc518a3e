"""Writes answers as server-sent events, with pings in streams that are silent for long.

A stream that cannot go on ends with an error in its protocol's form, and its connection breaks. Most
clients would take half an answer for the whole otherwise.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from typing import Any, Protocol

import orjson
from fastapi.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from serve_app.base.errors import CorralError

Json = dict[str, Any]

PING = b": ping\n\n"
"""A comment, which readers drop. Proxies take silence for a server that hangs."""


class StreamBrokenError(Exception):
    """The stream has sent why it cannot go on: its connection breaks."""


class StreamForm(Protocol):
    """The form of a stream in one protocol."""

    media_type: str

    def ping(self) -> bytes:
        """The event that is sent where the stream waits. Some clients count only data as a sign of life,
        so it is such an event where the protocol has one that changes nothing."""

    def failure(self, error: CorralError) -> bytes:
        """The last event of a stream that fails."""


def encode_json(body: Any) -> bytes:
    """The JSON of a body of any size, which may have NumPy's arrays. The standard library would take ten
    times as long, but knows integers of more than 64 bits, which a model may write."""
    try:
        return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def one_line(body: Json) -> bytes:
    """JSON without the characters that some readers of lines take for ends of lines."""
    line = encode_json(body)
    for end in "\u0085\u2028\u2029":
        line = line.replace(end.encode(), b"\\u%04x" % ord(end))
    return line


def json_response(body: Any) -> Response:
    return Response(encode_json(body), media_type="application/json")


def data(body: Json) -> bytes:
    return b"data: %b\n\n" % one_line(body)


def named_event(body: Json) -> bytes:
    return b"event: %b\n%b" % (body["type"].encode(), data(body))


_NOISE_CHARS = 64


def obfuscation(text: str) -> Json:
    """A field of noise for an event with this text, as OpenAI has it. Together they fill whole blocks of
    characters, so that the size does not show the text's length."""
    n_chars = -len(text) % _NOISE_CHARS
    return {"obfuscation": secrets.token_hex(_NOISE_CHARS // 2)[:n_chars]}


class EventStream(StreamingResponse):
    """The answer to an HTTP request, which no proxy shall hold back, or take for dead."""

    def __init__(
        self, events: AsyncIterator[bytes], form: StreamForm, ping_interval_s: float | None = None
    ) -> None:
        """A ping is sent whenever nothing was sent for so many seconds; 0 and less: never; None: as the
        application's `state.sse_ping_interval_s` says. Where `events` raises StreamBrokenError, the answer
        has no end."""
        super().__init__(
            events,
            media_type=form.media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._interval_s = ping_interval_s
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        interval_s = self._interval_s
        if interval_s is None:
            interval_s = state.sse_ping_interval_s
        sending = StreamSend(send, self._form, interval_s)
        state.streams.add(sending)
        try:
            await super().__call__(scope, receive, sending)
        finally:
            state.streams.discard(sending)
            sending.close()

    async def stream_response(self, send: Send) -> None:
        """Send all events, and the end, unless there is none."""
        with suppress(StreamBrokenError):
            await super().stream_response(send)


class StreamSend:
    """An ASGI `send` that adds a ping to the body whenever nothing was sent for `interval_s` seconds, from
    its first message to its last. `close` must be called at the end. For one event loop.

    A stream has one timer, which looks when the last message was sent: a message costs a look at the clock.
    """

    def __init__(self, send: Send, form: StreamForm, interval_s: float) -> None:
        """No pings for an interval of 0 and less."""
        self._send = send
        self._form = form
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._has_begun = self._is_over = False

    async def __call__(self, message: Message) -> None:
        async with self._sending:
            if self._is_over:
                return
            self._has_begun = True
            await self._send(message)
            self._sent_at = self._loop.time()
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.close()
            elif self._timer is None and self._interval_s > 0:
                self._timer = self._loop.call_later(self._interval_s, self._look)

    def close(self) -> None:
        """No ping from here on. Idempotent."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()

    async def fail(self, error: CorralError) -> None:
        """Send this error as the last event, and drop what comes behind it."""
        async with self._sending:
            if self._is_over or not self._has_begun:
                return
            self.close()
            await self._send(_piece(self._form.failure(error)))

    def _look(self) -> None:
        """Ping if it is time for that. Not while a message waits for a client that reads slowly: what that
        one has not read yet is enough."""
        left_s = self._sent_at + self._interval_s - self._loop.time()
        if left_s <= 0:
            left_s = self._interval_s
            if not self._sending.locked():
                self._pinging = self._loop.create_task(self._send_ping())
        self._timer = self._loop.call_later(left_s, self._look)

    async def _send_ping(self) -> None:
        async with self._sending:
            if self._is_over:
                return
            with suppress(Exception):  # if the client has left, the next message's sender is told
                await self._send(_piece(self._form.ping()))
            self._sent_at = self._loop.time()


def _piece(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def fail_all(streams: Collection[StreamSend], error: CorralError, limit_s: float) -> None:
    """End all of these streams with this error, but for those whose clients read nothing for so long."""
    tasks = [asyncio.create_task(stream.fail(error)) for stream in streams]
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
