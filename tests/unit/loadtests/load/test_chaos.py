"""When a scenario's verdict is bad, on books made by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from loadtests.load.chaos import SCENARIOS, growth, load_of, problems, verdict
from loadtests.load.driver import Result
from loadtests.load.observer import Sample
from serve_app.cli.measure.outcomes import ABORTED, COMPLETE, FAILED, REFUSED, Outcome

RUN_S = 40


def outcome(number: int, end: str = COMPLETE, reason: str = "") -> Outcome:
    """One that starts at this second and takes one."""
    return Outcome(str(number), "chat", float(number), 1.0, end, reason, answer_id=f"a{number}")


def result(name: str, outcomes: list[Outcome], ended: dict[str, int]) -> Result:
    load = load_of(name, 4, RUN_S, "")
    sent = [one.id for one in outcomes]
    return Result(load, sent, outcomes, [], Counter(ended), float(RUN_S), 0.1, 0.0, 0.0)


GOOD = [outcome(i) for i in range(RUN_S)]
LEFT = [*GOOD[:-1], outcome(39, ABORTED, "left")]


def test_good_verdicts() -> None:
    refused = [*GOOD[:-1], outcome(39, REFUSED, "429 queue_full")]
    assert problems("overload", result("overload", refused, {"stop": 30, "length": 9})) == []
    assert problems("vanish", result("vanish", LEFT, {"stop": 39, "abort": 1})) == []
    assert problems("slow", result("slow", GOOD, {"length": 40})) == []
    assert problems("kill", result("kill", GOOD, {"stop": 3})) == []  # counts died along
    assert verdict("slow", result("slow", GOOD, {"length": 40})).endswith("GOOD")


@pytest.mark.parametrize(
    ("name", "outcomes", "ended", "problem"),
    [
        ("overload", GOOD, {"stop": 40}, "this was no overload"),
        ("vanish", GOOD, {"stop": 40}, "nobody left"),
        ("slow", GOOD, {"stop": 39}, "the server completed 39"),
        ("slow", GOOD, {"stop": 41}, "the server completed 41"),
        ("slow", GOOD, {"stop": 40, "abort": 1}, "the server ended 41 of 40 accepted"),
        (
            "slow",
            [*GOOD[:-1], outcome(39, FAILED, "500 x")],
            {"stop": 39},
            "1 requests failed: 500 x",
        ),
        ("slow", [*GOOD, GOOD[0]], {"stop": 41}, "do not balance"),
        ("kill", GOOD[:20], {}, "was not replaced"),
        ("kill", [*GOOD[:-1], outcome(39, FAILED, "500 x")], {}, "1 requests failed: 500 x"),
        ("slow", [outcome(1, ABORTED, "left")], {"abort": 1}, "no request was answered"),
    ],
)
def test_bad_verdicts(
    name: str, outcomes: list[Outcome], ended: dict[str, int], problem: str
) -> None:
    found = problems(name, result(name, outcomes, ended))
    assert any(problem in one for one in found), found
    assert "BAD: " in verdict(name, result(name, outcomes, ended))


def test_a_request_that_never_ended_and_a_server_that_never_rests() -> None:
    made = result("slow", GOOD, {"stop": 40})
    found = problems("slow", replace(made, sent=[*made.sent, "lost"], idle_after_s=None))
    assert len(found) == 2
    assert "1 missing" in found[0]
    assert "still running" in found[1]


def samples(rss_mib: list[float], store_mib: float = 0.0) -> list[Sample]:
    """Each with `store_mib` more of kept prefixes."""
    return [
        Sample(float(i), 1, 1, 0, 0.0, 1, 10, i * store_mib, mib, 100)
        for i, mib in enumerate(rss_mib)
    ]


def test_growth_is_seen_after_warming_up() -> None:
    assert growth(samples([500.0, 800.0, 1000.0, 1000.0, 1010.0, 1000.0, 1020.0, 1010.0])) == []
    growing = [1000.0 + 20 * i for i in range(40)]
    assert growth(samples(growing)) == ["memory grew from 1290 to 1690 MiB"]
    assert growth(samples(growing, store_mib=20.0)) == []  # a cache that fills, up to its bound
    assert growth(samples([1.0] * 3)) == ["too short to see whether anything grows"]


def test_overload_is_ten_times_the_capacity() -> None:
    assert load_of("overload", 16, None, "").users == 160
    assert load_of("soak", 16, None, "").run_s == 1800
    assert set(SCENARIOS) == {"overload", "kill", "slow", "vanish", "soak"}
