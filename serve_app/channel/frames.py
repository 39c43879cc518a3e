"""The frames of a channel, each a length and a MessagePack value.

The first frame is a `Hello`. Every other one is a list of items, what a step has brought to each call, or
a report, what the replica says of itself: bytes that only its maker and its reader understand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from serve_app.errors import CorralError, error_of, fields_of
from serve_app.types import TokenDelta

Item = tuple[int, TokenDelta | None]
"""The number of a call, and what came for it: None says that the engine has taken the request."""
WELCOME = b"+"
"""A listener's answer to a Hello that it accepts."""
MOST_HELLO_BYTES = 1024
_LENGTH = struct.Struct("<I")
_BYTES = (b"\xc4", b"\xc5", b"\xc6")
"""The first bytes of MessagePack values that are bytes."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """How an engine replica says who it is."""

    secret: str
    """The listener's, which engine replicas learn over Serve's handle."""
    replica_id: str


def _encoded(value: object) -> object:
    if isinstance(value, CorralError):
        return fields_of(value)
    raise NotImplementedError(type(value).__name__)


def _decoded(_: type, value: Any) -> CorralError:
    name, arguments = value
    return error_of(name, arguments)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)
_items = msgspec.msgpack.Decoder(list[Item], dec_hook=_decoded)
_hello = msgspec.msgpack.Decoder(Hello)
_report = msgspec.msgpack.Decoder(bytes)


def frame(value: Hello | list[Item] | bytes) -> bytes:
    """One frame, ready to be sent."""
    body = _encoder.encode(value)
    return _LENGTH.pack(len(body)) + body


def items(body: bytes) -> list[Item]:
    """The items of a frame's body. Raises msgspec.MsgspecError if that is something else."""
    return _items.decode(body)


def report(body: bytes) -> bytes | None:
    """The report that a frame's body is, or None if it is something else. Raises msgspec.MsgspecError."""
    return _report.decode(body) if body[:1] in _BYTES else None


def hello(body: bytes) -> Hello:
    """The first frame's body. Raises msgspec.MsgspecError if that is something else."""
    return _hello.decode(body)


class FrameBuffer:
    """Cuts what arrives into frames' bodies."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def n_bytes(self) -> int:
        """The number of bytes that wait for the rest of their frame."""
        return len(self._data)

    def add(self, data: bytes) -> Iterator[bytes]:
        """The bodies of the frames that are complete now. To be read to the end."""
        self._data += data
        begin = 0
        while len(self._data) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, begin)
            end = begin + _LENGTH.size + length
            if len(self._data) < end:
                break
            yield bytes(self._data[begin + _LENGTH.size : end])
            begin = end
        del self._data[:begin]
