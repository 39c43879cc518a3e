"""What is worth giving to another engine."""

from __future__ import annotations

import pytest

from serve_app.engine.kv_cache.packing import packed, token_array
from serve_app.engine.kv_cache.transfers import (
    MAX_PREFIXES,
    HotPrefix,
    Prefix,
    begun_with,
    hottest,
)
from serve_app.types import SHARED_GROUP

SYSTEM = [1] * 40
"""Tokens that many prompts begin with."""


def prompt(*parts: int) -> bytes:
    """`SYSTEM`, and 40 tokens for each part."""
    return packed([*SYSTEM, *(token for part in parts for token in [part] * 40)])


def ours(tokens: bytes) -> Prefix:
    return Prefix("ours", tokens)


def begun(
    prompts: list[bytes], held: list[bytes] | None = None, least: int = 2
) -> dict[bytes, tuple[int, int]]:
    """What is found, with a state of a byte for each of the holder's bytes."""
    holders = [(one, len(one)) for one in (prompts if held is None else held)]
    found = begun_with(map(ours, prompts), [(ours(one), size) for one, size in holders], least)
    assert {one.prefix.group for one in found} <= {"ours"}
    assert len({one.prefix for one in found}) == len(found)
    return {one.prefix.tokens: (one.n_begun, one.n_bytes) for one in found}


def test_packing() -> None:
    assert list(token_array(packed([0, 7, 2**31 - 1]))) == [0, 7, 2**31 - 1]


def test_what_prompts_have_in_common_counts_once() -> None:
    prompts = [prompt(2), prompt(3), prompt(4), prompt(5, 6), prompt(5, 7)]
    assert begun(prompts) == {
        prompt(): (5, len(prompt(2))),
        prompt(5): (2, len(prompt(5, 6))),
    }


def test_a_prompt_that_came_once_counts_for_who_leaves() -> None:
    assert begun([prompt(2), prompt(3)], least=1).keys() == {prompt(), prompt(2), prompt(3)}


def test_the_same_prompt_twice_is_shared() -> None:
    assert begun([prompt(2), prompt(2)]) == {prompt(2): (2, len(prompt(2)))}


def test_only_what_is_held_is_found() -> None:
    prompts = [prompt(2, 3), prompt(2, 3), prompt(2, 4)]
    assert begun(prompts, held=[]) == {}
    assert begun(prompts, held=[prompt(2), packed([9] * 80)]) == {prompt(2): (3, len(prompt(2)))}


def test_the_smallest_state_is_what_it_costs() -> None:
    held = [prompt(2, 3, 4), prompt(5), prompt(2, 3)]
    assert begun([prompt(2), prompt(2)], held) == {prompt(2): (2, len(prompt(2, 3)))}


def test_few_tokens_are_not_worth_it() -> None:
    assert begun([packed([1] * 31), packed([1] * 31)]) == {}
    # What 31 tokens share in bytes, but not in whole tokens, is nothing either.
    assert begun([packed([1] * 31 + [2]), packed([1] * 31 + [2 + 256])]) == {}


def test_cache_groups_have_nothing_in_common() -> None:
    mine, theirs = (Prefix(group, prompt(2)) for group in ("mine", "theirs"))
    assert begun_with([mine, theirs], [(mine, 10), (theirs, 10)], 2) == []
    assert begun_with([mine, mine, theirs], [(theirs, 10)], 2) == []
    assert begun_with([mine, mine, theirs], [(theirs, 10), (mine, 20)], 2) == [
        HotPrefix(mine, 2, 20)
    ]


def test_what_another_cache_group_holds_is_taken_and_what_is_pinned_is_not() -> None:
    mine = HotPrefix(Prefix("mine", prompt()), 2, 10)
    assert hottest([mine], [Prefix("theirs", prompt(2))], 100) == [mine]
    assert hottest([mine], [Prefix(SHARED_GROUP, prompt(2))], 100) == []
    theirs = HotPrefix(Prefix("theirs", prompt(2)), 3, 10)
    assert hottest([mine, theirs], [], 100) == [theirs, mine]


@pytest.mark.parametrize(
    ("held", "found"),
    [
        (Prefix("mine", prompt(2)), True),
        (Prefix("mine", packed([9])), False),
        (Prefix("theirs", prompt(2)), False),
        (Prefix("", prompt(2)), False),
        (Prefix(SHARED_GROUP, prompt(2)), True),
    ],
)
def test_who_finds_a_prefix(held: Prefix, found: bool) -> None:
    assert held.serves(Prefix("mine", prompt())) is found


def hot(tokens: bytes, n_begun: int, n_bytes: int = 10) -> HotPrefix:
    return HotPrefix(ours(tokens), n_begun, n_bytes)


def taken_of(offered: list[HotPrefix], held: list[bytes], budget: int) -> list[bytes]:
    return [one.prefix.tokens for one in hottest(offered, list(map(ours, held)), budget)]


@pytest.mark.parametrize(
    ("offered", "budget", "taken"),
    [
        ([hot(prompt(2), 3), hot(prompt(3), 5)], 100, [prompt(3), prompt(2)]),
        ([hot(prompt(2), 3), hot(prompt(3), 5)], 10, [prompt(3)]),
        ([hot(prompt(2), 3), hot(prompt(3), 5, 50)], 50, [prompt(2)]),  # by bytes, 3 is worth less
        ([hot(prompt(2), 3)], 9, []),
        ([], 100, []),
    ],
)
def test_the_budget_goes_to_what_saves_most(
    offered: list[HotPrefix], budget: int, taken: list[bytes]
) -> None:
    assert taken_of(offered, [], budget) == taken


def test_what_a_longer_one_has_is_not_taken_twice() -> None:
    offered = [hot(prompt(), 9), hot(prompt(2), 4)]
    assert taken_of(offered, [], 100) == [prompt(2)]
    assert taken_of(offered, [], 15) == [prompt()]  # no room for both
    near = [hot(packed([*SYSTEM, *range(10)]), 1), hot(packed([*SYSTEM, *range(20, 30)]), 1)]
    assert len(hottest(near, [], 100)) == 1


def test_what_is_held_already_is_not_taken() -> None:
    offered = [hot(prompt(), 9), hot(prompt(2), 4)]
    assert taken_of(offered, [prompt(3)], 100) == [prompt(2)]
    assert taken_of(offered, [prompt(2, 3)], 100) == []


def test_there_is_a_bound_on_their_number() -> None:
    offered = [hot(prompt(n), 1) for n in range(2, 100)]
    assert len(hottest(offered, [], 10_000)) == MAX_PREFIXES
