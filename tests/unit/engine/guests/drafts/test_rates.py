"""How many proposed tokens are right."""

from __future__ import annotations

import pytest

from serve_app.engine.guests.drafts.rates import AcceptanceRate


def test_what_a_draft_is_worth() -> None:
    rate = AcceptanceRate(0.5)
    assert rate.expected_tokens(0) == 1
    assert rate.expected_tokens(3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_right_and_wrong_tokens_move_the_rate() -> None:
    rate = AcceptanceRate(0.7)
    for _ in range(50):
        rate.record(3, 3)
    assert rate.acceptance > 0.99
    for _ in range(50):
        rate.record(3, 0)
    assert rate.acceptance < 0.01


def test_tokens_behind_a_wrong_one_tell_nothing() -> None:
    short, long = AcceptanceRate(0.7), AcceptanceRate(0.7)
    short.record(2, 1)
    long.record(7, 1)
    assert short == long


def test_a_bad_rate_comes_back_to_the_likely_one_and_no_higher() -> None:
    rate = AcceptanceRate(0.1)
    for _ in range(1000):
        rate.forgive(0.5)
    assert rate.acceptance == pytest.approx(0.5, abs=0.001)
    rate.acceptance = 0.9
    rate.forgive(0.5)
    assert rate.acceptance == 0.9
