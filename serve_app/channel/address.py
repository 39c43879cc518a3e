"""Where an ingress listens for tokens, and how a connection to it is made."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CONNECT_S = 5.0
"""Longest time that a connection may take to be made and believed."""
_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
"""A host that vanishes is noticed after some 20 seconds. See tcp(7)."""


@dataclass(frozen=True, slots=True)
class Address:
    """One ingress replica's. It crosses the Serve handle with every request."""

    node_id: str
    """Ray's, of the node that it is on."""
    path: str
    """Name of a Unix socket in the abstract namespace, for replicas on the same node."""
    host: str
    port: int
    """Port for replicas on other nodes."""
    secret: str = field(repr=False)
    """Proves that a connection comes from the receiver of this address."""


def connected(address: Address, node_id: str) -> socket.socket:
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
    """As Ray's own connections have it: both sides show a certificate of the cluster's authority, whatever
    host it names. Source: Ray's documentation, "TLS authentication"."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    return context
