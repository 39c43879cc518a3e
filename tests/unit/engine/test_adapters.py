"""Whose turn it is among sequences with different adapters."""

from __future__ import annotations

import pytest

from serve_app.engine.backends.adapters import AdapterTurns
from serve_app.engine.core.sequence import Sequence
from serve_app.types import Adapters, AdapterUse, GenerationRequest, may_start_from


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


def priced(max_stall_s: float | None, switch_s: float) -> AdapterTurns:
    """Turns whose switches were seen to take so long."""
    turns = AdapterTurns(max_stall_s)
    for _ in range(4):
        turns.observe(4, 0.05 + switch_s, switched=True)
        turns.observe(4, 0.05, switched=False)
    assert turns.switch_s == pytest.approx(switch_s)
    return turns


def test_a_switch_without_a_price_is_made_after_every_step() -> None:
    sequences = [sequence("", 0.1), sequence("a", 0.2), sequence("b", 0.3), sequence("c", 0.4)]
    assert order(priced(0.25, 0.0), sequences, [1, 2, 3, 4, 5, 6, 7, 8]) == "-abc-abc"


def test_who_has_more_sequences_has_no_more_steps() -> None:
    sequences = [sequence("a", 0.1), sequence("a", 0.1), sequence("a", 0.1), sequence("b", 0.2)]
    assert order(AdapterTurns(0.25), sequences, [1, 2, 3, 4]) == "abab"


@pytest.mark.parametrize(
    ("max_stall_s", "expected"),
    [
        pytest.param(None, "aaaabbbb", id="the price is a twentieth of a turn of 0.4 s"),
        pytest.param(0.2, "aabbaabb", id="nobody waits longer than a stream may"),
    ],
)
def test_a_price_makes_turns_longer(max_stall_s: float | None, expected: str) -> None:
    turns = priced(max_stall_s, 0.02)
    sequences = [sequence("a", 0.1), sequence("b", 0.2)]
    times = [1 + 0.101 * i for i in range(8)]
    assert order(turns, sequences, times) == expected


def test_who_comes_back_waits_for_no_more_than_the_others_steps() -> None:
    turns, a, b = priced(0.25, 0.0), sequence("a", 0.1), sequence("b", 0.2)
    assert order(turns, [a, b], [1, 2]) == "ab"
    assert order(turns, [a], [3, 4, 5]) == "aaa"
    late = sequence("b", 5.5)
    assert order(turns, [a, late], [6, 7, 8]) == "aba"


def test_the_price_is_measured_in_turns_of_two_steps() -> None:
    turns, sequences = AdapterTurns(0.25), [sequence("a", 0.1), sequence("b", 0.2)]
    assert order(turns, sequences, [1 + 0.06 * i for i in range(8)]) == "aabbaabb"
    late = AdapterTurns(0.25), [1 + 0.11 * i for i in range(4)]
    assert order(late[0], sequences, late[1]) == "abab"  # one step is long enough for a turn


def test_the_price_is_what_a_batch_takes_longer_than_the_next_one_like_it() -> None:
    turns = AdapterTurns(0.25)
    turns.observe(4, 0.09, switched=True)
    turns.observe(5, 0.01, switched=False)
    assert turns.switch_s == 0
    turns.observe(4, 0.09, switched=True)
    turns.observe(4, 0.07, switched=False)
    turns.observe(4, 0.01, switched=False)
    assert turns.switch_s == pytest.approx(0.02)
    turns.observe(4, 0.11, switched=True)
    turns.observe(4, 0.07, switched=False)
    assert turns.switch_s == pytest.approx(0.03)
    for _ in range(20):
        turns.observe(4, 0.06, switched=True)
        turns.observe(4, 0.07, switched=False)
    assert turns.switch_s == 0


def test_only_the_step_after_a_switch_costs_more() -> None:
    turns = priced(0.25, 0.2)
    turns.choose([sequence("a")], 1.0)
    assert turns.price_s(use("")) == pytest.approx(0.2)
    assert turns.price_s(use("a")) == 0


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
