"""Who fetches which piece from where, by tables."""

from __future__ import annotations

import pytest

from serve_app.store.sharing import swarm as module
from serve_app.store.sharing.swarm import (
    AVOID_S,
    CUT_OFF_S,
    LEASE_S,
    N_UPLOADS,
    Swarm,
)


def joined(**have: str) -> Swarm:
    """A swarm of these nodes: "10" is a node that has the first of two pieces."""
    made = Swarm(len(next(iter(have.values()))))
    for node, pieces in have.items():
        made.join(node, f"/{node}", bytes(map(int, pieces)), (), 0.0)
    return made


def take(
    swarm: Swarm, node: str, now: float = 0.0, getting: tuple[int, ...] = ()
) -> tuple[int, str] | None:
    """The piece, and the node that has it, or "origin"."""
    found = swarm.next(node, getting, now)
    return None if found is None else (found.piece, found.node or "origin")


def takes(swarm: Swarm, *nodes: str, now: float = 0.0) -> list[tuple[int, str] | None]:
    """What these nodes get, one after another."""
    return [take(swarm, node, now) for node in nodes]


@pytest.mark.parametrize(
    ("have", "asked", "given"),
    [
        ({"a": "000"}, "aaaa", [(0, "origin"), (1, "origin"), (2, "origin"), None]),
        ({"a": "0000", "b": "0000"}, "abab", [(n, "origin") for n in range(4)]),
        ({"a": "00", "b": "00"}, "aabb", [(0, "origin"), (1, "origin"), None, None]),
        ({"a": "11", "b": "00"}, "bbb", [(1, "a"), (0, "a"), None]),
        ({"a": "10", "b": "00"}, "bb", [(1, "origin"), (0, "a")]),
        ({"a": "1000000", "b": "0000000"}, "bbbb", [(1, "origin"), (2, "origin"), (0, "a"), (3, "origin")]),
        ({"a": "110", "b": "100", "c": "001"}, "cc", [(1, "a"), (0, "b")]),
        ({"a": "011", "b": "101", "c": "110"}, "abc", [(0, "b"), (1, "a"), (2, "a")]),
        ({"a": "111100", "b": "000000"}, "bbb", [(0, "a"), (1, "a"), (2, "a")]),
        ({"a": "11"}, "a", [None]),
    ],
    ids=[
        "alone",
        "different pieces",
        "a piece that comes is not fetched twice",
        "all from a node",
        "what nobody has first",
        "so many from the origin, then what is there",
        "the rarest first, from the node that does least",
        "each the one that it lacks",
        "what one node alone has is copied before there is more of that",
        "nothing to do",
    ],
)  # fmt: skip
def test_a_piece_is_fetched_once(
    have: dict[str, str], asked: str, given: list[tuple[int, str] | None]
) -> None:
    assert takes(joined(**have), *asked) == given


def test_what_came_is_had_by_others() -> None:
    swarm = joined(a="00", b="00")
    assert takes(swarm, "a", "b") == [(0, "origin"), (1, "origin")]
    swarm.done("a", 0, 1.0)
    assert take(swarm, "b", 1.0) == (0, "a")
    swarm.done("b", 0, 2.0)
    swarm.done("b", 1, 2.0)
    assert take(swarm, "a", 2.0) == (1, "b")


def test_a_node_gives_few_pieces_at_once() -> None:
    many = N_UPLOADS + 2
    swarm = joined(a="1" * many, b="0" * many)
    found = takes(swarm, *"b" * many)
    assert [one is None for one in found] == [False] * N_UPLOADS + [True] * 2
    assert found[0] is not None
    swarm.done("b", found[0][0], 0.0)
    assert take(swarm, "b") is not None


def test_a_lease_without_progress_ends() -> None:
    swarm = joined(a="00", b="00")
    assert takes(swarm, "a", "a") == [(0, "origin"), (1, "origin")]
    swarm.renew("a", 1, LEASE_S - 1)
    assert take(swarm, "b", LEASE_S - 0.1) is None
    assert take(swarm, "b", LEASE_S) == (0, "origin")
    assert take(swarm, "b", LEASE_S) is None
    swarm.renew("b", 0, 2 * LEASE_S - 1)
    assert take(swarm, "b", 2 * LEASE_S) == (1, "origin")


def test_a_node_that_joins_again_has_no_old_leases_but_what_it_says() -> None:
    swarm = joined(a="000", b="000")
    assert takes(swarm, "a", "a", "a") == [(0, "origin"), (1, "origin"), (2, "origin")]
    swarm.join("a", "/a", b"\1\0\0", (1,), 1.0)
    assert takes(swarm, "b", "b", "b", now=1.0) == [(2, "origin"), (0, "a"), None]


def test_what_is_being_got_is_not_given_again() -> None:
    swarm = joined(a="00")
    assert take(swarm, "a", getting=(0,)) == (1, "origin")


def test_a_node_that_failed_is_avoided_for_a_while_and_by_that_node_only() -> None:
    swarm = joined(a="1", b="0", c="0")
    assert take(swarm, "b") == (0, "a")
    swarm.failed("b", 0, "a", 0.0)
    assert take(swarm, "c") == (0, "a")
    assert take(swarm, "b") == (0, "origin")
    swarm.failed("b", 0, None, 0.0)
    assert take(swarm, "b", AVOID_S) == (0, "a")


def test_a_node_that_is_gone_has_nothing() -> None:
    swarm = joined(a="1", b="0")
    swarm.forget("a")
    assert take(swarm, "b") == (0, "origin")
    assert not swarm.is_member("a")


def test_a_node_that_left_still_gives_what_it_has() -> None:
    swarm = joined(a="10", b="00")
    assert take(swarm, "a") == (1, "origin")
    swarm.leave("a")
    assert takes(swarm, "b", "b") == [(0, "a"), (1, "origin")]
    assert not swarm.is_member("a")


def test_a_node_that_cannot_reach_the_origin_leaves_it_to_others() -> None:
    swarm = joined(a="00", b="00")
    assert take(swarm, "a") == (0, "origin")
    swarm.failed("a", 0, None, 0.0)
    assert take(swarm, "a", 1.0) is None
    assert take(swarm, "b", 1.0) == (0, "origin")
    swarm.done("b", 0, 2.0)
    assert take(swarm, "a", 2.0) == (0, "b")
    assert take(swarm, "a", CUT_OFF_S) == (1, "origin")


def test_if_nobody_reaches_the_origin_each_tries_on() -> None:
    swarm = joined(a="0", b="0")
    for node in "ab":
        assert take(swarm, node) == (0, "origin")
        swarm.failed(node, 0, None, 0.0)
    found = swarm.next("a", (), 1.0)
    assert found is not None
    assert found.is_last_resort
    assert not joined(c="0").next("c", (), 0.0).is_last_resort  # type: ignore[union-attr]


def test_a_node_that_is_there_no_more_is_not_waited_for() -> None:
    swarm = joined(a="0", b="0")
    assert take(swarm, "a") == (0, "origin")
    swarm.failed("a", 0, None, 0.0)
    assert take(swarm, "a", 1.0) is None
    found = swarm.next("a", (), LEASE_S)
    assert found is not None
    assert found.is_last_resort


def test_a_slow_piece_is_fetched_by_another_node_who_has_nothing_else_to_do() -> None:
    swarm = joined(a="000", b="000")
    assert takes(swarm, "a", "b", "b") == [(0, "origin"), (1, "origin"), (2, "origin")]
    swarm.done("b", 1, 2.0)
    swarm.done("b", 2, 2.0)
    slow_s = module._SLOW_S + 1
    swarm.renew("a", 0, slow_s)
    assert take(swarm, "b", slow_s - 2) is None
    assert take(swarm, "b", slow_s) == (0, "origin")
    assert take(swarm, "a", slow_s) == (1, "b")


def test_where_all_are_slow_nobody_is() -> None:
    swarm = joined(a="00", b="00")
    assert takes(swarm, "a", "b") == [(0, "origin"), (1, "origin")]
    for now in range(0, 200, 10):
        swarm.renew("a", 0, now)
        swarm.renew("b", 1, now)
    swarm.done("b", 1, 190.0)
    swarm.renew("a", 0, 200.0)
    assert take(swarm, "b", 200.0) is None


def test_whole_files_are_had_from_whoever_has_them() -> None:
    swarm = joined(late="000")
    swarm.hold("a", "/hub/x")
    swarm.hold("late", "/old")
    found = swarm.next("late", (), 0.0)
    assert found is not None
    assert (found.node, found.path, found.is_last_resort) == ("a", "/hub/x", False)
    swarm.hold("a", "/hub/x")
    assert [piece for piece, _ in filter(None, takes(swarm, "late", "late"))] != []
    assert take(swarm, "late") is None


@pytest.mark.parametrize("dying", ["a", "b", "c"])
def test_all_get_all_whoever_dies(dying: str) -> None:
    """Four nodes take turns; one is gone after a while. What others have leaves the origin once."""
    n_pieces, nodes = 40, ["a", "b", "c", "d"]
    swarm = joined(**dict.fromkeys(nodes, "0" * n_pieces))
    n_from_origin, n_done = 0, dict.fromkeys(nodes, 0)
    for now in range(10_000):
        if now == 15:
            nodes.remove(dying)
        for node in nodes:
            found = swarm.next(node, (), float(now))
            if found is None:
                continue
            if found.node == dying and now >= 15:
                swarm.failed(node, found.piece, dying, float(now))
                swarm.forget(dying)
                continue
            n_from_origin += found.node is None
            n_done[node] += 1
            swarm.done(node, found.piece, float(now))
        if all(n_done[node] == n_pieces for node in nodes):
            break
    assert {n_done[node] for node in nodes} == {n_pieces}
    assert n_from_origin <= 1.1 * n_pieces
    assert not swarm.is_active(20_000.0)
