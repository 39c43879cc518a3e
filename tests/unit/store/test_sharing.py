"""Who copies a file from whom: a line of nodes, by tables, and what happens to it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from serve_app.store import sharing
from serve_app.store.remote import Holder
from serve_app.store.sharing import (
    ClusterPeers,
    HolderLine,
    MissingPieceError,
    UpstreamChangedError,
)
from tests.unit.store import key_values

A, B, C = (Holder(number, name, f"/{name}") for number, name in enumerate("abc"))
WHOLE = Holder(9, "w", "/w", is_whole=True)


@pytest.mark.parametrize(
    ("others", "number", "holder"),
    [
        ([], 0, None),
        ([B, C], 0, None),
        ([A, C], 1, A),
        ([A, B], 2, B),
        ([A, B, WHOLE], 2, B),
        ([B, WHOLE], 0, WHOLE),
    ],
    ids=["alone", "the first one", "the second", "the last", "in a line", "a whole file"],
)
def test_a_node_copies_from_the_one_before_it(
    others: list[Holder], number: int, holder: Holder | None
) -> None:
    assert sharing.chosen(others, number) == holder


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The nodes that are there."""
    key_values.shared(monkeypatch)
    nodes = {"a", "b", "c"}
    found = lambda: [{"NodeID": name, "Alive": name in nodes} for name in "abc"]  # noqa: E731
    monkeypatch.setattr(ray, "nodes", found)
    monkeypatch.setattr(sharing, "_ORDER_EVERY_S", 0.0)
    return nodes


def line(*names: str) -> list[ClusterPeers]:
    """These nodes, which begin one after the other."""
    made = [ClusterPeers(name, "key", Path(f"/{name}"), threading.Event()) for name in names]
    for peers in made:
        peers.upstream()
    return made


def sources(*line: ClusterPeers) -> list[str | None]:
    found = [peers.upstream() for peers in line]
    return [None if holder is None else holder.node for holder in found]


def test_nodes_stand_in_a_line(alive: set[str]) -> None:
    a, b, c = line("a", "b", "c")
    assert sources(a, b, c) == [None, "a", "b"]
    alive.discard("b")
    assert sources(a, c) == [None, "a"]
    alive.discard("a")
    assert sources(c) == [None]


def test_who_fails_is_skipped_for_a_while(alive: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = line("a", "b", "c")
    found = c.upstream()
    assert found is not None
    c.avoid(found, UpstreamChangedError())
    assert sources(c) == ["b"]
    c.avoid(found, MissingPieceError("no progress"))
    assert sources(a, b, c) == [None, "a", "a"]
    monkeypatch.setattr("serve_app.store.sharing.time.monotonic", lambda: 1e9)
    assert sources(c) == ["b"]


def test_who_cannot_reach_the_origin_lets_each_other_node_try_once(alive: set[str]) -> None:
    a, b, c = line("a", "b", "c")
    assert a.step_back()
    assert sources(b, c, a) == [None, "b", "c"]
    assert a.step_back(), "its other threads copy now"
    assert sources(b, c, a) == [None, "b", "c"]
    assert b.step_back()
    assert sources(c, a, b) == [None, "c", "a"]
    assert not c.step_back(), "all others are cut off"
    c.withdraw()
    assert sources(a, b) == [None, "a"]
    assert not a.step_back()


def test_who_begins_again_stands_behind_all(alive: set[str]) -> None:
    line("a", "b")
    again, c = line("a", "c")
    assert sources(again, c) == ["b", "a"]
    assert [holder.node for holder in HolderLine("key").read()] == ["b", "a", "c"]


class Node:
    """A peer actor that has nothing yet."""

    age_s: float | None = 0.0
    is_there = False

    def ask(self, node: str, method: str, *arguments: Any) -> Any:
        if method == "age":
            return self.age_s
        return b"data" if self.is_there else None


def test_a_piece_is_waited_for_as_long_as_its_node_makes_progress(
    alive: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_LOOK_EVERY_S", 0.0)
    (first,) = line("a")
    part = tmp_path / "m.gguf.part"
    part.touch()
    os.utime(part, (0, 0))
    second = ClusterPeers("b", "key", tmp_path / "m.gguf", threading.Event())
    age_s = sharing._age(tmp_path / "m.gguf")
    assert age_s is not None
    assert age_s < 60, "its file was made with the model's other files"
    holder, node = second.upstream(), Node()
    assert holder is not None
    monkeypatch.setattr(second, "_ask", node.ask)
    before = part.stat().st_mtime_ns
    second._wait(holder)
    assert part.stat().st_mtime_ns > before, "the next one in the line sees the progress"
    node.is_there = True
    assert list(second.read(holder, 0, 0, 4)) == [b"data"]
    node.is_there, node.age_s = False, sharing.STALL_S + 1
    with pytest.raises(MissingPieceError, match="no progress"):
        next(second.read(holder, 0, 0, 4))
    node.age_s = None
    with pytest.raises(MissingPieceError, match="the file is gone"):
        next(second.read(holder, 0, 0, 4))
    node.age_s = 0.0
    first.withdraw()
    with pytest.raises(UpstreamChangedError):
        next(second.read(holder, 0, 0, 4))
