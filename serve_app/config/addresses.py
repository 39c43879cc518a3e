"""Network addresses and the names of hosts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]*)?")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)  # what a socket for both families tells
    return (mapped or address).is_loopback


def is_within(host: str, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    """Whether an address is in one of the networks."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in networks)


def host_name(header: str) -> str | None:
    """The name or address in a `Host` header, in lower case, without port, brackets and the dot at its end;
    None if it is none."""
    found = _HOST.fullmatch(header.strip().lower())
    return None if found is None else found[1].strip("[]").removesuffix(".") or None


def network_of(address: str) -> str:
    """The network that counts as one client: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
