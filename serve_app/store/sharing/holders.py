"""The nodes that have a whole file, for nodes that come later.

It is kept where Ray's nodes keep what they share, and lasts as long as the cluster's head. It may be
old: a node that is asked in vain shows that. All functions ask Ray's head, block meanwhile, and raise its
errors.
"""

from __future__ import annotations

import ray
from ray.experimental import internal_kv

_NAMESPACE = b"corral"


def add(key: str, node: str, path: str) -> None:
    """A node has the file of that key there."""
    internal_kv._internal_kv_put(_name(key, node), path.encode(), True, namespace=_NAMESPACE)


def remove(key: str, node: str) -> None:
    """It has it no more."""
    internal_kv._internal_kv_del(_name(key, node), namespace=_NAMESPACE)


def read(key: str) -> dict[str, str]:
    """The nodes that are there and have it, and where."""
    found = {}
    alive = nodes()
    for name in internal_kv._internal_kv_list(_name(key, ""), namespace=_NAMESPACE):
        node = name.rpartition(b"/")[2].decode()
        path: bytes | None = internal_kv._internal_kv_get(name, namespace=_NAMESPACE)
        if path is not None and node in alive:
            found[node] = path.decode()
    return found


def put_listing(name: str, listing: str) -> None:
    """The files of that name are these."""
    internal_kv._internal_kv_put(_listing(name), listing.encode(), True, namespace=_NAMESPACE)


def listing(name: str) -> str | None:
    """The entries that were put there."""
    found: bytes | None = internal_kv._internal_kv_get(_listing(name), namespace=_NAMESPACE)
    return None if found is None else found.decode()


def nodes() -> set[str]:
    """The cluster's nodes that are there."""
    known = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in known if node["Alive"]}


def _listing(name: str) -> bytes:
    return f"listings/{name}".encode()


def _name(key: str, node: str) -> bytes:
    return f"files/{key}/{node}".encode()
