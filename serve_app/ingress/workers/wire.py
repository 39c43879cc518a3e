"""Messages between the ingress and its workers: a length, and then a value.

The ingress sends pickles, and behind work the body as it is. A body is neither pickled nor joined in the
event loop, which would copy megabytes at once. Workers read what clients send, and may be taken over by it:
so their results are MessagePack of the type that the work returns, and nothing else is made of the bytes.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import socket
import struct
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError

from serve_app.errors import CorralError

_LENGTH = struct.Struct("<Q")
# The event loop copies no more at once.
_STRIDE = 64 * 2**10


@dataclass(frozen=True, slots=True)
class WorkResult:
    """The result of work."""

    value: Any
    ignored: Sequence[str] = ()
    """Fields of the body that Corral does not have."""


Outcome = WorkResult | CorralError


class _PackedOutcome(msgspec.Struct, array_like=True, frozen=True):
    """A result, or the name and the arguments of a CorralError."""

    value: msgspec.Raw
    ignored: Sequence[str] = ()
    error: tuple[str, list[Any]] | None = None


# -- what the ingress sends --------------------------------------------------------------------


def packed(message: object) -> bytes:
    """One message of the ingress, ready to be written."""
    return _framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


async def send(
    writer: asyncio.StreamWriter, work: object, pieces: Sequence[bytes], changes: object
) -> None:
    """Event loop: send work, changes of the models, and a body. Returns when the other end has taken nearly
    all of it. Raises ConnectionError if the other end is gone."""
    writer.write(packed((work, sum(map(len, pieces)), changes)))
    for piece in pieces:
        for start in range(0, len(piece), _STRIDE):
            writer.write(piece[start : start + _STRIDE])
            await writer.drain()
    await writer.drain()


def receive(connection: socket.socket) -> Any:
    """Blocking: the next message of the ingress. Raises EOFError if it is gone."""
    (length,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    return pickle.loads(receive_bytes(connection, length))


def receive_bytes(connection: socket.socket, length: int) -> bytes:
    """Blocking: so many bytes. Raises EOFError if the other end is gone."""
    data = connection.recv(length, socket.MSG_WAITALL) if length else b""
    if len(data) != length:
        raise EOFError
    return data


# -- what the ingress gets ---------------------------------------------------------------------


def packed_outcome(outcome: Outcome) -> bytes:
    """One result or error, ready to be written."""
    if isinstance(outcome, CorralError):
        error = type(outcome).__name__, list(outcome.args)
        return _framed(_ENCODER.encode(_PackedOutcome(_NOTHING, error=error)))
    value = msgspec.Raw(_ENCODER.encode(outcome.value))
    return _framed(_ENCODER.encode(_PackedOutcome(value, outcome.ignored)))


async def received(reader: asyncio.StreamReader, kind: Any) -> Outcome:
    """Event loop: the next result, of this type, or an error. Raises EOFError if the other end is gone,
    and msgspec.MsgspecError if it sends anything else."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        data = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
    outcome = _OUTCOMES.decode(data)
    if outcome.error is None:
        return WorkResult(_decoder(kind).decode(outcome.value), outcome.ignored)
    name, arguments = outcome.error
    try:
        return _errors()[name](*arguments)
    except (KeyError, TypeError, ValueError):
        raise msgspec.ValidationError(f"There is no such error: {name[:64]!r}") from None


def result_type(work: Callable[..., Any]) -> Any:
    """The type of the work's results, as its annotation says. Work may be an object that has the function
    as its attribute `work`."""
    return _return_type(getattr(work, "work", work))


@functools.cache
def _return_type(function: Callable[..., Any]) -> Any:
    return typing.get_type_hints(function)["return"]


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _encoded(value: object) -> bytes:
    if isinstance(value, BaseModel):
        return value.model_dump_json(by_alias=True).encode()
    raise NotImplementedError(type(value).__name__)


def _decoded(kind: type, value: Any) -> Any:
    try:
        if issubclass(kind, BaseModel):
            return kind.model_validate_json(value)
    except ValidationError:
        raise ValueError(f"This is no {kind.__name__}.") from None
    raise NotImplementedError(kind.__name__)


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decoded)


@functools.cache
def _errors() -> dict[str, type[CorralError]]:
    """The classes of errors, by their names."""
    kinds, by_name = [CorralError], dict[str, type[CorralError]]()
    while kinds:
        kind = kinds.pop()
        by_name[kind.__name__] = kind
        kinds += kind.__subclasses__()
    return by_name


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_NOTHING = msgspec.Raw(_ENCODER.encode(None))
_OUTCOMES = msgspec.msgpack.Decoder(_PackedOutcome)
