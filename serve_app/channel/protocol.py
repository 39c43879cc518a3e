"""The protocol of a channel: where an ingress listens, how replicas connect to it, and the frames.

A frame is a length and a MessagePack value. The first frame is a `Hello`. Every other one is a list of
items or a report. Items are what a step has brought to each call. A report is what the replica says of
itself, in bytes that only its maker and its reader understand.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.channel.msgpack import decoder, encode

CONNECT_S = 5.0
"""Longest time that a connection may take to be made and believed."""
_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""A host that vanishes is noticed after some 20 seconds. See tcp(7)."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an ingress replica. It crosses the Serve handle with every request."""

    node_id: str
    """Ray's id of the node that the replica is on."""
    path: str
    """Name of a Unix socket in the abstract namespace, for replicas on the same node."""
    host: str
    port: int
    secret: str = field(repr=False)
    """Proves that a connection comes from the receiver of this address."""


def connect(address: Address, node_id: str) -> socket.socket:
    """A connection from that node, blocking, with bounds on time. Raises OSError."""
    if node_id == address.node_id:
        with _unless_it_fails(socket.socket(socket.AF_UNIX)) as local:
            local.settimeout(CONNECT_S)
            local.connect("\0" + address.path)
        return local
    connection = socket.create_connection((address.host, address.port), CONNECT_S)
    with _unless_it_fails(connection) as remote:
        keep_alive(remote)
        secured = client_tls()
        return remote if secured is None else secured.wrap_socket(remote)


def greet(address: Address, node_id: str, name: str) -> socket.socket:
    """A connection from that node, under that name, which the listener believes; blocking. Raises
    OSError."""
    with _unless_it_fails(connect(address, node_id)) as connection:
        connection.sendall(frame(Hello(address.secret, name)))
        if connection.recv(len(WELCOME)) != WELCOME:
            raise ConnectionRefusedError("The listener refused the secret.")
    return connection


@contextmanager
def _unless_it_fails(connection: socket.socket) -> Iterator[socket.socket]:
    """A connection that is closed if the block raises."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def keep_alive(connection: socket.socket) -> None:
    """Send at once what is sent, and notice when the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def server_tls() -> ssl.SSLContext | None:
    """TLS for a listener, if the cluster has it; else None. Raises OSError for files it cannot read."""
    return _tls(ssl.PROTOCOL_TLS_SERVER)


def client_tls() -> ssl.SSLContext | None:
    """TLS for a connection to a listener, if the cluster has it; else None. Raises OSError as above."""
    return _tls(ssl.PROTOCOL_TLS_CLIENT)


def _tls(protocol: int) -> ssl.SSLContext | None:
    """The TLS context for either side, as Ray's own connections have it: both show a certificate of the
    cluster's authority, whatever host it names. Source: Ray's documentation, "TLS authentication"."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    return context


Item = tuple[int, TokenDelta | Accepted]
"""The number of a call, and what came for it."""
WELCOME = b"+"
MOST_HELLO_BYTES = 1024
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
_BYTES = (b"\xc4", b"\xc5", b"\xc6")
"""The first bytes of MessagePack values that are bytes."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """How an engine replica says who it is."""

    secret: str
    """The listener's, which engine replicas learn over Serve's handle."""
    replica_id: str


_items: msgspec.msgpack.Decoder[list[Item]] = decoder(list[Item])


def frame(value: Hello | list[Item] | bytes) -> bytes:
    """The value as a frame, ready to be sent."""
    return frame_body(encode(value))


def frame_body(body: bytes) -> bytes:
    """A body behind its length."""
    return _LENGTH.pack(len(body)) + body


def length_of(begin: bytes | bytearray) -> int:
    """The length of the body that the first `LENGTH_BYTES` of a frame say."""
    length: int = _LENGTH.unpack(begin)[0]
    return length


def items(body: bytes) -> list[Item]:
    """The items of a frame's body. Raises msgspec.MsgspecError if that is something else."""
    return _items.decode(body)


def report(body: bytes) -> bytes | None:
    """The report that a frame's body is, or None if it is something else. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(body, type=bytes) if body[:1] in _BYTES else None


def hello(body: bytes) -> Hello:
    """The first frame's body. Raises msgspec.MsgspecError if that is something else."""
    return msgspec.msgpack.decode(body, type=Hello)


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
