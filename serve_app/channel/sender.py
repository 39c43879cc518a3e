"""An engine replica's side of channels: frames go out between two steps, and nobody waits for a reader."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from serve_app.base.errors import ChannelBrokenError
from serve_app.base.values.answers import Accepted, FinishReason, SequenceEnd, TokenDelta
from serve_app.channel import protocol
from serve_app.channel.protocol import Address

logger = logging.getLogger("corral.replica")

MOST_TOKENS = 4096
"""The most tokens of a frame, beside its last call's: what has piled up comes in several frames."""
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Channel:
    """A connection to an ingress. `push` and `flush` are for any thread, all else for the event loop.

    Deltas that a slow reader has not taken yet stay here, merged into one for each call. When the
    connection breaks, every call that is open fails, and what is pushed later is dropped.
    """

    def __init__(self, connection: socket.socket, lost: Callable[[Channel], None]) -> None:
        """The connection is believed already. `lost` is called once if it breaks."""
        connection.setblocking(False)
        self._connection = connection
        self._fd = connection.fileno()
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._held: dict[int, TokenDelta | None] = {}
        """The deltas of open calls that came before their acceptance."""
        self._accepted: list[protocol.Item] = []
        self._pending: dict[int, TokenDelta] = {}
        self._report: bytes | None = None
        self._unsent = memoryview(b"")
        self._is_blocked = False
        self._is_broken = False
        self._calls: dict[int, asyncio.Future[SequenceEnd]] = {}
        self._loop.add_reader(self._fd, self._readable)

    def open_call(self, number: int) -> asyncio.Future[SequenceEnd]:
        """A call that is answered here. The future has its request's end when that was pushed. It fails
        with ChannelBrokenError if the connection breaks. Close the call when it is done."""
        call = self._calls[number] = self._loop.create_future()
        self._held[number] = None
        if self._is_broken:
            call.set_exception(_broken())
        return call

    def close_call(self, number: int) -> None:
        """End the call: nothing comes for it any more. Idempotent."""
        call = self._calls.pop(number, None)
        with self._lock:
            self._held.pop(number, None)
        if call is not None and not call.cancel() and not call.cancelled():
            call.exception()  # or asyncio complains where nobody has waited for it

    def accept(self, number: int, accepted: Accepted) -> None:
        """Say that an open call's request was taken, before its deltas: the decoder may be faster."""
        with self._lock:
            delta = self._held.pop(number, None)
            if self._is_broken:
                return
            self._accepted.append((number, accepted))
            if delta is not None:
                self._pending[number] = delta

    def push(self, number: int, delta: TokenDelta) -> None:
        """Something for a call. `flush` sends it.

        An error's own text is dropped: it was held back, and whoever goes on with the request brings it.
        The end of one that was aborted is not sent: its call was left, or goes on elsewhere."""
        if delta.end is not None:
            if delta.end.reason is FinishReason.ABORT:
                return
            if delta.end.error is not None:
                delta = replace(delta, text="")
        with self._lock:
            if self._is_broken:
                return
            waiting = self._held if number in self._held else self._pending
            before = waiting.get(number)
            waiting[number] = delta if before is None else before.then(delta)
        if delta.end is not None:
            self._tell(partial(self._end, number, delta.end))

    def _end(self, number: int, end: SequenceEnd) -> None:
        call = self._calls.get(number)
        if call is not None and not call.done():
            call.set_result(end)

    def report(self, body: bytes) -> bool:
        """Send what the replica says of itself. False if the reader is behind, or gone."""
        with self._lock:
            if self._is_blocked or self._is_broken:
                return False
            self._report = body
        self.flush()
        return True

    def flush(self) -> None:
        """Send what was pushed, as far as the reader takes it; the rest goes when it does."""
        with self._lock:
            if self._is_blocked or self._is_broken:
                return
            try:
                self._send()
            except _BLOCKED:
                self._is_blocked = True
                self._tell(self._wait)
            except Exception as error:  # whatever cannot be sent, the decoder goes on
                if not isinstance(error, OSError):
                    logger.exception("Tokens cannot be sent")
                self._is_broken = True
                self._tell(self.close)

    def _send(self) -> None:
        while self._unsent or self._accepted or self._pending or self._report is not None:
            if not self._unsent:
                self._unsent = memoryview(protocol.frame(self._next()))
            self._unsent = self._unsent[self._connection.send(self._unsent) :]

    def _next(self) -> list[protocol.Item] | bytes:
        report, self._report = self._report, None
        return self._first_items() if report is None else report

    def _first_items(self) -> list[protocol.Item]:
        first = self._accepted[:MOST_TOKENS]
        del self._accepted[:MOST_TOKENS]
        n_tokens = len(first)
        while self._pending and n_tokens < MOST_TOKENS:
            number = next(iter(self._pending))
            delta = self._pending.pop(number)
            first.append((number, delta))
            n_tokens += 1 + len(delta.token_ids) + len(delta.prompt_logprobs)
        return first

    def _tell(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to know
            self._loop.call_soon_threadsafe(call)

    def _wait(self) -> None:
        if not self._is_broken:
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        self._loop.remove_writer(self._fd)
        with self._lock:
            self._is_blocked = False
        self.flush()

    def _readable(self) -> None:
        """The ingress never sends anything: this is its end, or TLS's own business."""
        try:
            with self._lock:  # a TLS connection may be used by one thread at a time
                is_open = bool(self._connection.recv(4096))
        except _BLOCKED:
            return
        except OSError:
            is_open = False
        if not is_open:
            self.close()

    def close(self) -> None:
        """End the channel; calls that are open fail. Idempotent."""
        with self._lock:
            self._is_broken = True
            self._held.clear()
            self._accepted.clear()
            self._pending.clear()
            self._report = None
            self._unsent = memoryview(b"")
        if self._connection.fileno() < 0:
            return
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._connection.close()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(_broken())
        self._lost(self)


class Channels:
    """An engine replica's channels, one for each ingress. Event loop only, but for `flush`."""

    def __init__(self, node_id: str, replica_id: str) -> None:
        self._node_id = node_id
        self._replica_id = replica_id
        self._channels: dict[str, Channel] = {}
        self._opening: dict[str, asyncio.Task[Channel]] = {}

    async def to(self, address: Address) -> Channel:
        """The channel to this ingress, opened if there is none. Raises ChannelBrokenError."""
        channel = self._channels.get(address.path)
        if channel is not None:
            return channel
        opening = self._opening.get(address.path)
        if opening is None:
            opening = asyncio.ensure_future(self._open(address))
            self._opening[address.path] = opening
            opening.add_done_callback(lambda _: self._opening.pop(address.path))
        return await asyncio.shield(opening)

    async def _open(self, address: Address) -> Channel:
        try:
            connection = await asyncio.to_thread(
                protocol.greet, address, self._node_id, self._replica_id
            )
        except (OSError, ValueError) as error:
            logger.warning(
                "No channel to an ingress at %s:%d: %s", address.host, address.port, error
            )
            raise ChannelBrokenError("The engine replica cannot reach the ingress.") from error

        def forget(channel: Channel) -> None:
            if self._channels.get(address.path) is channel:
                del self._channels[address.path]

        channel = self._channels[address.path] = Channel(connection, forget)
        return channel

    @property
    def open(self) -> tuple[Channel, ...]:
        """The open channels. Any thread."""
        return tuple(self._channels.copy().values())  # copying is atomic, and one may open now

    def flush(self) -> None:
        """Any thread: send what the last step has brought."""
        for channel in self.open:
            channel.flush()

    def close(self) -> None:
        for channel in self.open:
            channel.close()


def _broken() -> ChannelBrokenError:
    return ChannelBrokenError("The connection between ingress and engine replica broke.")
