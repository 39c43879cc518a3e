"""Messages between the ingress and its workers: a length, then a pickle.

Both ends are processes of one user, started by the same program.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def packed(message: object) -> bytes:
    """One message, ready to be written."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:
    """Blocking: the next message. Raises EOFError if the other end is gone."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return pickle.loads(_read(connection, length))


def _read(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        n_read = connection.recv_into(view)
        if not n_read:
            raise EOFError
        view = view[n_read:]
    return data


async def received(reader: asyncio.StreamReader) -> Any:
    """Event loop: the next message. Raises EOFError if the other end is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError from error
