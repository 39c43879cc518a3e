"""Calls of a replica's methods over a socket between two processes of a local server.

A message is a frame, as channels have them. Values carry the name of their kind, and nothing is made of
a message but values of these kinds. A process that a client has taken over could send anything.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from serve_app.base.errors import CorralError, EngineFailedError
from serve_app.base.values.media import Medium
from serve_app.base.values.replicas import Asleep, ReplicaRecords, ReplicaStats, SlotAction
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel import msgpack
from serve_app.channel.protocol import Address, FrameBuffer, frame_body
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import AdapterConfig

logger = logging.getLogger("corral.local")

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Address, AdapterConfig, GenerationRequest, ResolvedModel),
        *(Asleep, CorralError, ReplicaRecords, ReplicaStats, SlotAction),
    )
} | {
    "tokens": tuple[tuple[int, ...], ...],  # of texts; and the sizes of pictures and sounds
    "media": tuple[Medium, ...],
    "array": tuple[tuple[int, ...], bytes],
    "": Any,
}


class CallMessage(msgspec.Struct, array_like=True, frozen=True):
    """A call, with the name of its method; the end of a call, without values; or the answer to a call."""

    number: int
    method: str | None
    values: tuple[tuple[str, msgspec.Raw], ...] = ()


def pack_value(value: object) -> tuple[str, msgspec.Raw]:
    """A value with the name of its kind. Raises TypeError for another one."""
    kind = "CorralError" if isinstance(value, CorralError) else type(value).__name__
    if isinstance(value, np.ndarray):
        kind, value = "array", (value.shape, np.ascontiguousarray(value, np.float32).tobytes())
    elif isinstance(value, tuple | list):
        kind = "media" if value and isinstance(value[0], Medium) else "tokens"
    elif kind not in _KINDS:
        kind = ""
    return kind, msgspec.Raw(msgpack.encode(value))


def unpack_value(kind: str, value: msgspec.Raw) -> Any:
    """The value of that kind. Raises msgspec.MsgspecError or KeyError if it is none."""
    content = msgpack.decoder(_KINDS[kind]).decode(value)
    if kind == "array":
        return np.frombuffer(content[1], np.float32).reshape(content[0])
    return content


Answer = Callable[..., Awaitable[Any]]


class Connection(asyncio.Protocol):
    """Calls methods of the other end of a socket, and answers its calls. Used in one event loop."""

    def __init__(self, answer: Callable[[str], Answer], lost: Callable[[], None]) -> None:
        """`answer` gives the method of a name that the other end may call, and raises KeyError for others.
        `lost` is called once, when the other end is gone."""
        self._answer, self._lost = answer, lost
        self._buffer = FrameBuffer()
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the other end. A CorralError is returned. Cancelling ends the call there. Raises
        EngineFailedError if the other end is lost meanwhile, or fails in any other way."""
        if self._transport.is_closing():
            raise _loss()
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(CallMessage(number, method, tuple(map(pack_value, arguments))))
        try:
            return await answer
        except asyncio.CancelledError:
            if not self._transport.is_closing():
                self._send(CallMessage(number, ""))
            raise
        finally:
            del self._calls[number]

    @property
    def n_calls(self) -> int:
        """The calls that the other end has not answered."""
        return len(self._calls)

    def _send(self, message: CallMessage) -> None:
        self._transport.write(frame_body(msgpack.encode(message)))

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._buffer.add(data):
                self._take(msgspec.msgpack.decode(body, type=CallMessage))
        except (msgspec.MsgspecError, KeyError, ValueError):
            logger.exception("A process of this server sent something that is no message")
            self.close()

    def _take(self, message: CallMessage) -> None:
        number, method = message.number, message.method
        if method is None:
            if (answer := self._calls.get(number)) is not None and not answer.done():
                answer.set_result(unpack_value(*message.values[0]))
        elif not method:
            if (task := self._answering.get(number)) is not None:
                task.cancel()
        else:
            arguments = [unpack_value(*value) for value in message.values]
            task = asyncio.create_task(self._run(number, self._answer(method), arguments))
            self._answering[number] = task
            task.add_done_callback(lambda _: self._answering.pop(number))

    async def _run(self, number: int, method: Answer, arguments: Sequence[object]) -> None:
        try:
            outcome = await method(*arguments)
        except CorralError as error:
            outcome = error
        except Exception as error:
            logger.exception("A call failed")
            outcome = EngineFailedError(f"The engine's process failed ({type(error).__name__}).")
        if not self._transport.is_closing():
            self._send(CallMessage(number, None, (pack_value(outcome),)))

    def connection_lost(self, _: Exception | None) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(_loss())
        for task in self._answering.values():
            task.cancel()
        self._lost()

    def close(self) -> None:
        """Close it now. Idempotent."""
        self._transport.abort()


def _loss() -> EngineFailedError:
    return EngineFailedError("The engine's process is lost.")
