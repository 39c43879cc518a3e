"""The arithmetic of the engine benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtests.engine import (
    Settings,
    check,
    parse_args,
    percentile,
    ratios,
    side_summary,
    summary,
    table,
)
from loadtests.engine_sides import BARE, ENGINE, BenchmarkError, Run


def run(*arrivals_s: Sequence[float], side: str = ENGINE, prompt: int = 8) -> Run:
    arrivals = tuple(map(tuple, arrivals_s))
    return Run(side, prompt, arrivals, steps=4, cpu_s=1.0, sleeps=2, preemptions=1)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 2.0, 3.0], 50, 2.5),
        ([0.0, 10.0], 99, 9.9),
        ([1.0, 2.0, 3.0], 0, 1.0),
        ([1.0, 2.0, 3.0], 100, 3.0),
    ],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_rates_of_a_lockstep_run() -> None:
    lockstep = run([1.0, 1.5, 2.0], [1.0, 1.5, 2.0])
    assert lockstep.generated_tokens == 6
    assert lockstep.wall_s == 2.0
    assert lockstep.whole_tps == 3.0
    assert lockstep.prefill_tps == 8.0
    assert lockstep.decode_tps == 4.0


def test_decode_rate_counts_only_while_all_decode() -> None:
    # The first sequence is fast alone; together, from 2 to 4 s, each gives one token per second.
    staggered = run([1.0, 1.1, 1.2, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 4.1])
    assert staggered.decode_tps == pytest.approx(2.0)


def test_decode_rate_does_not_depend_on_the_order_within_a_step() -> None:
    late_first = run([1.2, 2.2, 3.2], [1.0, 2.0, 3.0, 3.4])
    assert late_first.decode_tps == pytest.approx(2.0)


@pytest.mark.parametrize("second", [[3.0, 4.0], [2.0, 2.0], [1.5, 3.0]], ids=repr)
def test_too_short_a_decode_phase_is_an_error(second: list[float]) -> None:
    with pytest.raises(BenchmarkError, match="max-tokens"):
        _ = run([1.0, 2.0], second).decode_tps


def test_latencies() -> None:
    measured = run([1.0, 1.5, 1.5], [2.0, 2.5, 3.0])
    assert measured.ttft_s == [1.0, 2.0]
    assert measured.itl_s == [0.5, 0.0, 0.5, 0.5]


def test_ratios_compare_the_two_runs_of_a_pair() -> None:
    fast, slow = run([1.0, 2.0]), run([1.0, 3.0])
    result = ratios([{BARE: fast, ENGINE: slow}, {ENGINE: fast, BARE: slow}], "decode_tps")
    assert result == {"pairs": [0.5, 2.0], "median": 1.25, "min": 0.5, "max": 2.0}


def test_side_summary_takes_medians_of_runs_and_percentiles_of_tokens() -> None:
    result = side_summary([run([1.0, 2.0]), run([2.0, 4.0]), run([4.0, 8.0])])
    assert result["decode_tps"] == 0.5
    assert result["whole_tps"] == 0.5
    assert result["prefill_tps"] == 4.0
    assert result["ttft_p50_ms"] == 2000
    assert result["itl_p50_ms"] == 2000
    assert result["itl_p99_ms"] == pytest.approx(3960)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (run([1.0, 2.0], [1.0]), r"\[2, 1\] tokens"),
        (run([1.0, 2.0]), r"\[2\] tokens"),
        (run([1.0, 2.0], [1.0, 2.0], prompt=7), "7 prompt tokens"),
    ],
)
def test_another_amount_of_work_is_an_error(wrong: Run, message: str) -> None:
    settings = Settings(Path("m"), (2,), prompt_tokens=4, max_tokens=2, pairs=1, threads=1)
    check(run([1.0, 2.0], [1.0, 2.0]), 2, settings)
    with pytest.raises(BenchmarkError, match=message):
        check(wrong, 2, settings)


def test_table_has_a_line_of_facts_and_a_row_for_each_batch_size() -> None:
    pair = {ENGINE: run([1.0, 2.0]), BARE: run([1.0, 1.5], side=BARE)}
    facts = {
        "cpu": "A CPU",
        "cores": 2,
        "model": "m.gguf",
        "model_mb": 3,
        "llama_cpp_python": "1.2.3",
        "threads": 2,
        "prompt_tokens": 8,
        "max_tokens": 2,
    }
    lines = table(facts, [summary(1, [pair])]).splitlines()
    assert lines[0].startswith("A CPU, 2 cores, m.gguf (3 MB), llama-cpp-python 1.2.3, 2 threads")
    assert lines[-1].startswith("| 1 | 1.0 / 2.0 | 0.500 (0.500-0.500) | 1.0 / 1.3 | 0.750 ")
    assert {line.count("|") for line in lines[2:]} == {10}


@pytest.mark.parametrize(
    "bad", [["--slots", "0"], ["--slots", "1,x"], ["--pairs", "0"], ["--max-tokens", "1"]], ids=repr
)
def test_arguments_are_bounded(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--model", "m.gguf", *bad])
    assert bad[0] in capsys.readouterr().err


def test_arguments() -> None:
    settings, json_file = parse_args(["--model", "m.gguf", "--slots", "1,3", "--json", "out"])
    assert settings.slots == (1, 3)
    assert settings.options(3).n_slots == 3
    assert settings.options(3).n_ctx_slot > settings.prompt_tokens + settings.max_tokens
    assert json_file == Path("out")
