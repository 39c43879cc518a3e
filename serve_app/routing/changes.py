"""A replica's report as what has changed since the last one, in bytes. Pure."""

from __future__ import annotations

import msgspec

from serve_app.routing.blocks import pack, unpack
from serve_app.routing.score import Report

_SETS = ("blocks", "requests", "turns")
_FIGURES = tuple(name for name in Report.__slots__ if name not in _SETS)


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """By the names of a report's fields. Names that the reader does not know are left out: while Corral is
    updated, versions meet."""

    figures: dict[str, int | float] = {}
    """Figures that have changed."""
    added: dict[str, bytes] = {}
    """Hashes; see `serve_app.routing.blocks.pack`."""
    removed: dict[str, bytes] = {}


_decoder = msgspec.msgpack.Decoder(Change)


def change(before: Report | None, after: Report) -> bytes | None:
    """The change that makes the one of the other; all of it if there was none before. None if they
    are equal."""
    if before == after:
        return None
    figures, added, removed = {}, {}, {}
    for name in _FIGURES:
        figure = getattr(after, name)
        if before is None or figure != getattr(before, name):
            figures[name] = figure
    for name in _SETS:
        old: frozenset[int] = frozenset() if before is None else getattr(before, name)
        new: frozenset[int] = getattr(after, name)
        if new - old:
            added[name] = pack(tuple(new - old))
        if old - new:
            removed[name] = pack(tuple(old - new))
    return msgspec.msgpack.encode(Change(figures, added, removed))


def applied(before: Report | None, body: bytes) -> Report:
    """The report after that change. Raises msgspec.MsgspecError if it is none."""
    change = _decoder.decode(body)
    report = Report() if before is None else before
    fields = {name: change.figures.get(name, getattr(report, name)) for name in _FIGURES}
    for name in _SETS:
        old: frozenset[int] = getattr(report, name)
        added, removed = (unpack(sets.get(name, b"")) for sets in (change.added, change.removed))
        fields[name] = old.difference(removed).union(added) if added or removed else old
    return Report(**fields)
