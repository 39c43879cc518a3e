"""The search for the number of users, and what counts as holding them."""

from __future__ import annotations

import argparse

import pytest

from serve_app.cli.measure.capacity import Held, misses, most_users, parse_slo, table
from serve_app.cli.measure.outcomes import COMPLETE, FAILED, REFUSED, Outcome, figures


@pytest.mark.parametrize("limit", [1, 2, 100, 256])
@pytest.mark.parametrize("true", [0, 1, 2, 3, 5, 9, 16, 17, 63, 100, 255, 256, 999])
def test_the_search_ends_within_a_tenth_below(true: int, limit: int) -> None:
    tried: list[int] = []

    def holds(users: int) -> bool:
        tried.append(users)
        return users <= true

    found = most_users(holds, limit)
    best = min(true, limit)
    assert found <= best
    assert best - found <= max(0, found // 10 - 1)
    assert len(tried) == len(set(tried)) <= 16
    assert all(1 <= users <= limit for users in tried)
    assert found == 0 or found in tried


def test_an_slo_has_the_reports_names_and_units() -> None:
    assert parse_slo("ttft_p95=2s, itl_p95=150ms") == {"ttft_p95_s": 2.0, "itl_p95_ms": 150.0}
    assert parse_slo("ttft_p50=500ms,e2e_p99=1.5s,itl_p50=0.1s") == {
        "ttft_p50_s": 0.5,
        "e2e_p99_s": 1.5,
        "itl_p50_ms": 100.0,
    }


@pytest.mark.parametrize("wrong", ["", "ttft=2s", "ttft_p90=2s", "itl_p95=150", "ttft_p95=-1s"])
def test_a_wrong_slo_is_refused(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        parse_slo(wrong)


def outcome(end: str = COMPLETE, ttft_s: float | None = 0.5) -> Outcome:
    return Outcome("1", "chat", 0.0, 1.0, end, "", ttft_s, (0.1, 0.1), 3)


@pytest.mark.parametrize(
    ("outcomes", "missed"),
    [
        ([outcome()], []),
        ([outcome(ttft_s=2.5)], ["ttft_p95_s 2.5 > 2"]),
        ([outcome(), outcome(REFUSED, None)], ["1 refused"]),
        ([outcome(), outcome(FAILED, None)], ["1 failed"]),
        ([outcome(ttft_s=None)], ["ttft_p95_s unknown > 2"]),
    ],
)
def test_a_load_holds_if_nobody_is_refused_and_all_is_in_time(
    outcomes: list[Outcome], missed: list[str]
) -> None:
    measured = figures(outcomes, 10.0)
    assert misses(outcomes, measured, {"ttft_p95_s": 2.0, "itl_p95_ms": 150.0}) == missed


def test_the_table_names_what_holds_the_most() -> None:
    held = [
        Held("a", 8, {"tokens_per_s": 50.0}),
        Held("b", 8, {"tokens_per_s": 60.0}),
        Held("c", 0, {}),
    ]
    assert table(held, {"ttft_p95_s": 2.0}).endswith("Holds the most: b, 8 users.")
