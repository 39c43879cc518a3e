"""The nodes that have a file or download it, and the listings of repositories, as Ray's head keeps them.

An entry may be old: a node that is asked in vain shows that. All functions ask Ray's head, block meanwhile,
and raise its errors.
"""

from __future__ import annotations

from dataclasses import asdict

import ray
from ray.experimental import internal_kv

from serve_app.store.pieces import Holder
from serve_app.store.shared_entries import NumberedEntries

_NAMESPACE = b"corral"
_FILES = NumberedEntries("files", "nodes")


def add(key: str, node: str, path: str, *, is_whole: bool = False, is_cut_off: bool = False) -> int:
    """Have a node behind all others that have the file of that key. Returns its number."""
    entry = {"node": node, "path": path, "is_whole": is_whole, "is_cut_off": is_cut_off}
    for holder in of_node(key, node):
        remove(key, holder.number)
    return _FILES.add(key, entry)


def make_whole(key: str, holder: Holder) -> None:
    """A node has the whole file now."""
    entry = asdict(holder) | {"is_whole": True}
    del entry["number"]
    _FILES.replace(key, holder.number, entry)


def remove(key: str, number: int) -> None:
    """Forget a node that does not have the file any more."""
    _FILES.remove(key, number)


def read(key: str) -> list[Holder]:
    """The nodes that are there, in the order in which they began."""
    alive = {
        node["NodeID"]
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }
    holders = [Holder(number, **entry) for number, entry in _FILES.read(key)]
    return [holder for holder in holders if holder.node in alive]


def of_node(key: str, node: str) -> list[Holder]:
    """The entries of one node."""
    return [holder for holder in read(key) if holder.node == node]


def put_listing(name: str, listing: str) -> None:
    """The files of that name are these."""
    internal_kv._internal_kv_put(_listing(name), listing.encode(), True, namespace=_NAMESPACE)


def listing(name: str) -> str | None:
    """The entries that were put there."""
    found: bytes | None = internal_kv._internal_kv_get(_listing(name), namespace=_NAMESPACE)
    return None if found is None else found.decode()


def _listing(name: str) -> bytes:
    return f"listings/{name}".encode()
