"""What it takes to pick a token, as it is learned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.base.sampling import SamplingParams
from serve_app.engine.costs.sampling_costs import SamplingCost, sampling_kind

DEFAULT = SamplingParams()


def seen(*seconds: float) -> float:
    cost = SamplingCost()
    for one in seconds:
        cost.observe(2, 2 * one)
    return cost.token_s


def test_the_first_token_tells_and_later_ones_correct() -> None:
    assert seen() == 0
    assert seen(0.01) == pytest.approx(0.01)
    assert 0.01 < seen(0.01, 0.02) < 0.02
    assert seen(*[0.01] * 3, *[0.002] * 60) == pytest.approx(0.002, rel=0.01)
    assert seen(*[0.002] * 3, *[0.01] * 60) == pytest.approx(0.01, rel=0.01)


def test_one_hiccup_is_not_believed() -> None:
    assert seen(0.001, 5.0) < 0.002


def test_nothing_is_learned_where_nothing_was_picked() -> None:
    cost = SamplingCost()
    cost.observe(0, 9.0)
    assert cost.token_s == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(DEFAULT, top_k=0),
        replace(DEFAULT, top_k=4000),
        replace(DEFAULT, temperature=0),
        replace(DEFAULT, typical_p=0.9),
        replace(DEFAULT, logprobs=0),
        replace(DEFAULT, grammar="a"),
        replace(DEFAULT, frequency_penalty=1),
    ],
)
def test_what_takes_another_time_is_learned_apart(other: SamplingParams) -> None:
    assert sampling_kind(other) != sampling_kind(DEFAULT)
    assert sampling_kind(replace(other, seed=5, max_tokens=3)) == sampling_kind(other)
