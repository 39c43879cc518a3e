"""Pings in streams that are silent for long: proxies take silence for a server that hangs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Message, Send


class PingingSend:
    """An ASGI `send` that adds a ping to the body whenever nothing was sent for `interval_s` seconds, from
    its first message to its last. `close` must be called at the end. For one event loop.

    A stream has one timer, which looks when the last message was sent: a message costs a look at the clock.
    """

    def __init__(self, send: Send, ping: bytes, interval_s: float) -> None:
        self._send = send
        self._ping: Message = {"type": "http.response.body", "body": ping, "more_body": True}
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._is_over = False

    async def __call__(self, message: Message) -> None:
        """Send a message. Raises what the `send` below raises."""
        async with self._sending:
            await self._send(message)
            self._sent_at = self._loop.time()
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.close()
            elif self._timer is None:
                self._timer = self._loop.call_later(self._interval_s, self._look)

    def close(self) -> None:
        """No ping from here on. Idempotent."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()

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
                await self._send(self._ping)
            self._sent_at = self._loop.time()
