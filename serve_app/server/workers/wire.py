"""Messages between the ingress and its workers: a length, and then a MessagePack value.

Behind an order, the ingress sends the body as it is: the event loop would copy megabytes at once if it
joined or encoded them. Workers read what clients send, and may be taken over by it. So nothing is made of
their answers but values of the type that the work returns.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from serve_app.base.errors import CorralError
from serve_app.channel import msgpack
from serve_app.channel.protocol import LENGTH_BYTES, frame_body, length_of
from serve_app.server.model_registry import Models, NumberedAdapters

# The event loop copies no more at once.
_STRIDE = 64 * 2**10

Piece = bytes | memoryview
"""A part of a body or of a file."""
Work = Callable[[Models, Any], Any]
"""The work on a request's body: a function that can be imported, with types. The body is its second
argument: as it came if that is of `bytes`, and else parsed as that type. It may raise CorralError."""


@dataclass(frozen=True, slots=True)
class WorkResult:
    value: Any
    ignored: Sequence[str] = ()


Outcome = WorkResult | CorralError


class _PackedOutcome(msgspec.Struct, array_like=True, frozen=True):
    value: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))
    ignored: Sequence[str] = ()
    error: CorralError | None = None


class WorkOrder(msgspec.Struct, array_like=True, frozen=True):
    """Work on the body that follows, and on the files behind it."""

    work: str
    """The function, as `module:name`."""
    n_bytes: int
    adapters: Mapping[str, NumberedAdapters] = {}
    """The adapters of the models, by their ids, whose adapters have changed since workers read them."""
    files: tuple[tuple[str, int], ...] = ()
    """The URLs and bytes of the files that were fetched for the body."""
    allowed_models: Sequence[str] | None = None
    """The patterns of the models that the caller may use. None is all."""


def with_adapters(models: Models, adapters: Mapping[str, NumberedAdapters]) -> Models:
    """The models, some of them with other adapters."""
    if not adapters:
        return models
    return {
        name: replace(model, adapters=adapters.get(name, model.adapters))
        for name, model in models.items()
    }


def name_of(work: Callable[..., Any]) -> str:
    return f"{work.__module__}:{work.__qualname__}"


async def send(writer: asyncio.StreamWriter, order: object, pieces: Sequence[Piece]) -> None:
    """Event loop: send an order and what follows it. Returns when the other end has taken nearly all of it.
    Raises ConnectionError if the other end is gone."""
    writer.write(frame_body(msgpack.encode(order)))
    for piece in pieces:
        for start in range(0, len(piece), _STRIDE):
            writer.write(piece[start : start + _STRIDE])
            await writer.drain()
    await writer.drain()


def receive_order(connection: socket.socket) -> WorkOrder:
    """Blocking: the next order. Raises EOFError if the ingress is gone."""
    return msgspec.msgpack.decode(receive(connection), type=WorkOrder)


def receive(connection: socket.socket) -> bytes:
    """Blocking: the next message of the ingress. Raises EOFError if it is gone."""
    return receive_bytes(connection, length_of(receive_bytes(connection, LENGTH_BYTES)))


def receive_bytes(connection: socket.socket, length: int) -> bytes:
    """Blocking: so many bytes. Raises EOFError if the other end is gone."""
    data = b""
    while len(data) < length:  # a process that was stopped and goes on gets a part
        more = connection.recv(length - len(data), socket.MSG_WAITALL)
        if not more:
            raise EOFError
        data += more
    return data


def packed_outcome(outcome: Outcome) -> bytes:
    if isinstance(outcome, CorralError):
        return frame_body(msgpack.encode(_PackedOutcome(error=outcome)))
    value = msgspec.Raw(msgpack.encode(outcome.value))
    return frame_body(msgpack.encode(_PackedOutcome(value, outcome.ignored)))


async def receive_outcome(reader: asyncio.StreamReader, kind: Any) -> Outcome:
    """Event loop: the next result, of this type, or an error. Raises EOFError if the other end is gone,
    and msgspec.MsgspecError if it sends anything else."""
    try:
        data = await reader.readexactly(length_of(await reader.readexactly(LENGTH_BYTES)))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
    outcome: _PackedOutcome = msgpack.decoder(_PackedOutcome).decode(data)
    if outcome.error is not None:
        return outcome.error
    return WorkResult(msgpack.decoder(kind).decode(outcome.value), outcome.ignored)


@functools.cache
def result_type(work: Callable[..., Any]) -> Any:
    return typing.get_type_hints(work)["return"]
