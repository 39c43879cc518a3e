"""Who asks whom for which prefixes. That they come and go is tested end to end."""

from __future__ import annotations

import pytest

from serve_app.engine.cache.packing import pack
from serve_app.engine.cache.prefixes import Prefix
from serve_app.engine.cache.transfers import HotPrefix
from serve_app.run.replica.kv_transfer import (
    Offer,
    TransferTally,
    TransferTarget,
    plan_pull,
    plan_push,
)

A, B, C = (Prefix("ours", pack([n] * 40)) for n in range(3))


def hot(prefix: Prefix, n_begun: int = 2, n_bytes: int = 10) -> HotPrefix:
    return HotPrefix(prefix, n_begun, n_bytes)


def test_what_several_have_is_asked_of_the_one_with_the_smallest_state() -> None:
    offers = [
        Offer("one", b"", [hot(A, 3, 20), hot(B, 4)]),
        Offer("two", b"", [hot(A, 3, 10)]),
        Offer("three", b"", []),
    ]
    assert plan_pull(offers, [], 100) == [(hot(A, 6), "two"), (hot(B, 4), "one")]


@pytest.mark.parametrize(
    ("held", "room", "asked"), [([], 10, [A]), ([A], 100, [B]), ([A, B], 100, []), ([], 9, [])]
)
def test_a_new_replica_asks_for_what_it_lacks_and_has_room_for(
    held: list[Prefix], room: int, asked: list[Prefix]
) -> None:
    offers = [Offer("one", b"", [hot(A, 9), hot(B, 2)])]
    assert [one.prefix for one, _ in plan_pull(offers, held, room)] == asked


def test_what_two_cache_groups_begin_with_is_asked_for_each() -> None:
    theirs = A._replace(group="theirs")
    offers = [Offer("one", b"", [hot(A, 3)]), Offer("two", b"", [hot(theirs, 2)])]
    assert plan_pull(offers, [], 100) == [(hot(A, 3), "one"), (hot(theirs, 2), "two")]
    assert plan_pull(offers, [theirs], 100) == [(hot(A, 3), "one")]


def test_without_sources_nobody_is_asked() -> None:
    assert plan_pull([], [], 100) == []


def test_what_one_leaves_goes_to_who_has_most_room() -> None:
    offered = [hot(A, 9, 20), hot(B, 8, 20), hot(C, 7, 20)]
    targets = [
        TransferTarget("one", b"", [True] * 3, 45),
        TransferTarget("two", b"", [True] * 3, 30),
    ]
    assert [(one.prefix, target) for one, target in plan_push(offered, targets)] == [
        (A, "one"),
        (B, "two"),
        (C, "one"),
    ]


def test_only_what_all_lack_is_sent() -> None:
    offered = [hot(A), hot(B)]
    targets = [
        TransferTarget("one", b"", [True, False], 100),
        TransferTarget("two", b"", [True, True], 50),
    ]
    assert plan_push(offered, targets) == [(hot(A), "one")]


def test_the_last_one_has_no_target() -> None:
    assert plan_push([hot(A)], []) == []


def test_what_fits_nobody_is_lost() -> None:
    targets = [TransferTarget("one", b"", [True], 15), TransferTarget("two", b"", [True], 15)]
    assert plan_push([hot(A, n_bytes=20)], targets) == []


def test_the_log_counts_what_was_kept() -> None:
    tally = TransferTally("Received", "from")
    tally.add("one", Prefix("", bytes(4 * 1000)), 2**20)
    tally.add("two", Prefix("", bytes(4 * 204)), 2**19)
    tally.add("three", Prefix("", bytes(4 * 99)), 0)  # refused
    assert str(tally).startswith("Received 2 prefixes, 1,204 tokens, 1.5 MiB from 2 replicas in 0.")
