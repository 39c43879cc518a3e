"""When a server is hurt, and what the table says, on results made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtests.hostile.attack import Attack, Bars
from loadtests.hostile.figures import Seen
from loadtests.hostile.report import COLUMNS, document, line, summary, table
from loadtests.hostile.verdict import HELD, HURT, Result

ATTACK = Attack("of a kind", "block", "Does it.", "Holds.", act=lambda scene: None)
CALM = Seen(40, 0.200, 0.100, 0.150, 0.020, ())


def result(**changes: object) -> Result:
    made = Result(ATTACK, 1.5, CALM, CALM, {"400": 3}, (), (), 1000.0, 1020.0, 0.1)
    return replace(made, **changes)  # type: ignore[arg-type]


def during(**changes: object) -> Result:
    return result(during=replace(CALM, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "made",
    [
        result(),
        during(ttft_p95_s=0.300),  # 1.5 times
        during(itl_p99_s=0.110),  # 1.1 times
        during(longest_pause_s=0.070),  # 50 ms more
        during(longest_gap_s=3.0),  # told, not judged
        result(memory_most_mib=1080.0),
        result(calm=replace(CALM, itl_p99_s=0.010), during=replace(CALM, itl_p99_s=0.019)),  # noise
        during(ttft_p95_s=None, itl_p99_s=None),
    ],
)
def test_held(made: Result) -> None:
    assert (made.verdict, made.reasons) == (HELD, [])


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (during(ttft_p95_s=0.320), "first tokens took 1.6 times as long"),
        (during(itl_p99_s=0.130), "gaps were 1.3 times as long"),
        (during(longest_pause_s=0.071), "/health took 0.07 s"),
        (during(failures=("failed: 503", "refused: 429")), "2 honest requests failed"),
        (during(answers=0), "no honest request was answered"),
        (result(memory_most_mib=1081.0), "memory grew by 81 MiB"),
        (result(died=["corral:ingress"]), "corral:ingress died"),
        (result(problems=["a key sees another's"]), "a key sees another's"),
        (result(recovered_s=None), "does not answer any more"),
        (result(calm=replace(CALM, failures=("failed: x",))), "this shows nothing"),
    ],
)
def test_hurt(made: Result, reason: str) -> None:
    assert made.verdict == HURT
    assert len(made.reasons) == 1
    assert reason in made.reasons[0]


def test_a_little_slower_may_be_others_fault() -> None:
    slow = replace(CALM, ttft_p95_s=0.800)  # 0.300 is what it may be
    assert result(during=slow).is_doubtful
    assert not result().is_doubtful
    assert not during(ttft_p95_s=0.910).is_doubtful
    assert not during(longest_pause_s=0.220).is_doubtful  # 0.070 is what it may be
    assert not result(during=slow, problems=["a key sees another's"]).is_doubtful
    assert not result(during=slow, died=["engine"]).is_doubtful
    assert not result(during=slow, memory_most_mib=9000.0).is_doubtful
    assert not result(during=replace(slow, failures=("failed: 503",))).is_doubtful


def test_reasons_that_are_many_are_cut_in_the_table_only() -> None:
    made = result(problems=[str(number) for number in range(6)])
    assert "| 0; 1; 2; 3; 2 more |" in table([made])
    assert len(made.reasons) == 6


def test_a_bar_that_is_none_is_not_looked_at() -> None:
    bars = Bars(ttft_factor=None, itl_factor=None, pause_s=None, memory_mib=None)
    slow = replace(CALM, ttft_p95_s=9.0, itl_p99_s=9.0, longest_pause_s=9.0)
    made = result(attack=replace(ATTACK, bars=bars), during=slow, memory_most_mib=9000.0)
    assert made.verdict == HELD


def test_table_has_calm_and_attack() -> None:
    hurt = during(ttft_p95_s=1.0, failures=("failed: 503",))
    head, _, first, second = table([result(), hurt]).splitlines()
    assert head.count("|") == first.count("|") == second.count("|") == len(COLUMNS) + 1
    assert first == "| block: of a kind | 200 → 200 | 100 → 100 | 20 → 20 | +20 | held |"
    assert "| 200 → 1000 | 100 → 100 | 20 → 20 |" in second
    assert "| 1 honest requests failed (failed: 503); first tokens took 5.0 times" in second


def test_answers_that_are_many_are_cut() -> None:
    answers = {"200": 1, "400": 5, "429 queue_full": 2, "500": 2, "503": 1, "cut": 1}
    told = line(result(answers=answers))
    assert "(got 5 x 400, 2 x 429 queue_full, 2 x 500, 1 x 200, 2 others)" in told
    assert "(got nothing)" in line(result(answers={}))


def test_summary_names_who_was_hurt() -> None:
    text = summary([result(), result(died=["engine"])])
    assert text == "1 of 2 attacks held.\nHURT block: of a kind: engine died"


def test_document_has_everything() -> None:
    (entry,) = document([result(died=["engine"])], {"cores": 2})["attacks"]
    assert entry["verdict"] == HURT
    assert entry["calm"]["ttft_p95_s"] == entry["during"]["ttft_p95_s"] == 0.2
    assert entry["memory_mib"] == [1000.0, 1020.0]
