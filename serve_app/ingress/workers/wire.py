"""Messages between the ingress and its workers: a length, then a pickle; behind work, the body as it is.

A body is neither pickled nor joined in the event loop, which would copy megabytes at once. Both ends are
processes of one user, started by the same program.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("<Q")
# The event loop copies no more at once.
_STRIDE = 64 * 2**10


def packed(message: object) -> bytes:
    """One message, ready to be written."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


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
    """Blocking: the next message. Raises EOFError if the other end is gone."""
    (length,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    return pickle.loads(receive_bytes(connection, length))


def receive_bytes(connection: socket.socket, length: int) -> bytes:
    """Blocking: so many bytes. Raises EOFError if the other end is gone."""
    data = connection.recv(length, socket.MSG_WAITALL) if length else b""
    if len(data) != length:
        raise EOFError
    return data


async def received(reader: asyncio.StreamReader) -> Any:
    """Event loop: the next message. Raises EOFError if the other end is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
