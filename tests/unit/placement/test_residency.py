"""Which of the models on demand are loaded on a node. Each process is played by an object of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from serve_app.placement.residency import Residency

Process = Callable[[str, int], Residency]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """One with a model of that name, where so many may be loaded."""
    return lambda name, most: Residency(tmp_path / "loaded", name, most)


def test_so_many_have_a_place_and_one_that_leaves_makes_room(process: Process) -> None:
    a, b, c = (process(name, 2) for name in "abc")
    assert a.take(0)
    assert b.take(0)
    assert not c.take(0)
    a.leave()
    a.leave()
    assert c.take(0)
    assert not a.take(0)


def test_nobody_gives_way_while_nobody_waits(process: Process) -> None:
    a, b = process("a", 1), process("b", 1)
    assert a.take(0)
    assert not a.gives_way()
    with b.waiting(1):
        assert a.gives_way()
        assert not b.gives_way()  # it has nothing to give
    assert not a.gives_way()


def test_one_place_for_one_who_waits(process: Process) -> None:
    a, b, c = (process(name, 2) for name in "abc")
    assert a.take(0)
    assert b.take(1)
    with c.waiting(2):
        assert a.gives_way()
        a.leave()
        assert not b.gives_way()
        assert c.take(3)


@pytest.mark.parametrize(
    ("a", "b", "first"),
    [
        ((10, False), (20, False), "a"),  # used longest ago
        ((10, True), (20, True), "a"),  # has worked for longest
        ((10, True), (20, False), "b"),  # is idle
        ((9.5, False), (10.25, False), "a"),
    ],
)
def test_who_gives_way(
    process: Process, a: tuple[float, bool], b: tuple[float, bool], first: str
) -> None:
    loaded = {name: process(name, 2) for name in "ab"}
    for name, (since, is_busy) in zip("ab", (a, b), strict=True):
        assert loaded[name].take(0)
        loaded[name].note(since, is_busy=is_busy)
    with process("c", 2).waiting(30):
        assert [name for name in "ab" if loaded[name].gives_way()] == [first]


def test_who_has_waited_for_longest_is_next(process: Process) -> None:
    a, b, c, d = (process(name, 1) for name in "abcd")
    assert a.take(0)
    with ExitStack() as waiting:
        waiting.enter_context(c.waiting(1))
        with b.waiting(2):
            a.leave()
            assert not d.take(3)  # it comes last
            assert not a.take(3)
            assert not b.take(3)
            assert c.take(3)
            waiting.close()
            c.leave()
            assert b.take(4)


def test_a_place_and_a_wait_go_with_their_process(process: Process) -> None:
    a, b = process("a", 1), process("b", 1)
    pid = os.fork()
    if not pid:
        waits = process("c", 1).waiting(0)
        waits.__enter__()
        os._exit(1 if process("d", 1).take(0) else 0)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    pid = os.fork()
    if not pid:
        os._exit(0 if a.take(0) else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert b.take(0)


def test_names_are_no_paths(process: Process, tmp_path: Path) -> None:
    with process("../x@y", 1).waiting(0):
        assert [one.name for one in (tmp_path / "loaded").iterdir()] == ["waiting-..%2Fx%40y"]


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "loaded").symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        Residency(tmp_path / "loaded", "m", 1)
