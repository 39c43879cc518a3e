"""Whose turn it is among sequences with different adapters."""

from __future__ import annotations

import math

import pytest

from serve_app.base.values.adapters import Adapters, AdapterUse, may_start_from
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.core.scheduler.scheduler import TURN_S, AdapterTurns
from serve_app.engine.core.sequence import Sequence


def use(name: str) -> Adapters:
    return (AdapterUse(name, 1.0),) if name else ()


def sequence(adapter: str, submitted: float = 0.0) -> Sequence:
    request = GenerationRequest(adapter, (1, 2, 3), adapters=use(adapter))
    found = Sequence(request, lambda delta: None)
    found.trace.submitted = submitted
    return found


def order(turns: AdapterTurns, sequences: list[Sequence], times: list[float]) -> str:
    chosen = [turns.choose(sequences, now) for now in times]
    for served in chosen:
        assert len({one.request.adapters for one in served}) == 1
    return "".join(served[0].id or "-" for served in chosen)


def test_all_of_one_kind_are_served_in_every_step() -> None:
    turns, all_of_a = AdapterTurns(0.25), [sequence("a") for _ in range(3)]
    assert turns.choose(all_of_a, 1.0) == all_of_a
    assert turns.choose(all_of_a, 2.0) == all_of_a
    assert turns.choose([], 3.0) == []


def test_longer_steps_than_a_turn_take_turns_one_by_one() -> None:
    sequences = [sequence("", 0.1), sequence("a", 0.2), sequence("b", 0.3), sequence("c", 0.4)]
    assert order(AdapterTurns(0.25), sequences, [1, 2, 3, 4, 5, 6, 7, 8]) == "-abc-abc"


def test_who_has_more_sequences_has_no_more_steps() -> None:
    sequences = [sequence("a", 0.1), sequence("a", 0.1), sequence("a", 0.1), sequence("b", 0.2)]
    assert order(AdapterTurns(0.25), sequences, [1, 2, 3, 4]) == "abab"


@pytest.mark.parametrize(
    ("max_stall_s", "expected"),
    [
        pytest.param(math.inf, "aaaabbbb", id="short steps share a turn"),
        pytest.param(TURN_S / 2, "aabbaabb", id="nobody waits longer than a stream may"),
    ],
)
def test_a_turn_has_several_short_steps(max_stall_s: float, expected: str) -> None:
    sequences = [sequence("a", 0.1), sequence("b", 0.2)]
    times = [1 + (TURN_S / 4 + 1e-6) * i for i in range(8)]
    assert order(AdapterTurns(max_stall_s), sequences, times) == expected


def test_who_comes_back_waits_for_no_more_than_the_others_steps() -> None:
    turns, a, b = AdapterTurns(0.25), sequence("a", 0.1), sequence("b", 0.2)
    assert order(turns, [a, b], [1, 2]) == "ab"
    assert order(turns, [a], [3, 4, 5]) == "aaa"
    late = sequence("b", 5.5)
    assert order(turns, [a, late], [6, 7, 8]) == "aba"


@pytest.mark.parametrize(
    ("group", "held", "may"),
    [
        ("mine", "mine", True),
        ("mine", "*", True),
        ("mine", "other", False),
        ("mine\0a=1.0", "*", False),
        ("mine\0a=1.0", "mine", False),
        ("mine\0a=1.0", "mine\0a=1.0", True),
    ],
)
def test_adapters_share_nothing_with_others(group: str, held: str, *, may: bool) -> None:
    assert may_start_from(group, held) is may


def test_the_group_of_what_is_computed_tells_adapters_and_scales() -> None:
    def group(*adapters: AdapterUse) -> str:
        return GenerationRequest("x", (1,), cache_group="g", adapters=adapters).content_group

    a, b = AdapterUse("a", 1.0), AdapterUse("b", 1.0)
    groups = [group(), group(a), group(b), group(a, b), group(AdapterUse("a", 0.5))]
    assert groups[0] == "g"
    assert len(set(groups)) == len(groups)
