"""How many proposed tokens are right: of a sequence, and of all."""

from __future__ import annotations

import pytest

from serve_app.engine.drafts.rates import Allowance, CommonRate


def test_what_a_draft_is_worth() -> None:
    rate = CommonRate().begin()
    rate.acceptance = 0.5
    assert rate.expected(0) == 1
    assert rate.expected(3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)


def test_right_and_wrong_tokens_move_the_rate() -> None:
    rate = CommonRate().begin()
    for _ in range(50):
        rate.record(3, 3)
    assert rate.acceptance > 0.99
    for _ in range(50):
        rate.record(3, 0)
    assert rate.acceptance < 0.01


def test_tokens_behind_a_wrong_one_tell_nothing() -> None:
    one, other = CommonRate().begin(), CommonRate().begin()
    one.record(2, 1)
    other.record(7, 1)
    assert one.acceptance == other.acceptance


def test_a_new_sequence_is_expected_to_be_as_the_others_were() -> None:
    common = CommonRate()
    first = common.begin()
    for _ in range(300):
        first.record(1, 0)
    assert common.begin().acceptance < 0.1


def test_what_the_others_were_is_forgotten_with_new_sequences() -> None:
    common = CommonRate()
    first = common.begin()
    for _ in range(300):
        first.record(1, 0)
    assert [common.begin() for _ in range(100)][-1].acceptance > 0.65


def test_a_bad_rate_comes_back_to_that_of_all_and_no_higher() -> None:
    common = CommonRate()
    common.acceptance = 0.5
    rate = common.begin()
    rate.acceptance = 0.1
    for _ in range(1000):
        rate.unused()
    assert rate.acceptance == pytest.approx(common.acceptance, abs=0.001)
    rate.acceptance = 0.9
    rate.unused()
    assert rate.acceptance == 0.9


def test_a_few_trials_are_granted_at_first_and_then_a_small_part_of_the_time() -> None:
    allowance = Allowance()
    n_trials = 0
    for _ in range(10_000):
        allowance.passed(0.1)
        if allowance.grants(0.5):
            allowance.changes(-0.5)
            n_trials += 1
    assert n_trials * 0.5 < 0.02 * 10_000 * 0.1
    assert n_trials > 10


def test_what_was_right_is_not_lost() -> None:
    allowance = Allowance()
    for _ in range(100):
        assert allowance.grants(0.5)
        allowance.changes(-0.5)
        allowance.changes(0.6)


def test_trials_are_not_saved_up() -> None:
    allowance = Allowance()
    allowance.grants(0.5)
    allowance.passed(1e6)
    n_trials = 0
    while allowance.grants(0.5):
        allowance.changes(-0.5)
        n_trials += 1
    assert n_trials < 6
