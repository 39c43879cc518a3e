"""The figures of the engine benchmark's runs, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtests.engine.__main__ import Settings, check, parse_args
from loadtests.engine.modes import BARE, BATCHED, SEPARATE
from loadtests.engine.report import Round, plot, ratios, summary, table
from loadtests.engine.run import AnyRun, ModeRun, NativeRun
from serve_app.cli.measure import bench
from serve_app.cli.measure.benchmark import BenchmarkError

FACTS = {
    "cpu": "A CPU",
    "cores": 2,
    "model": "m.gguf",
    "model_mb": 3,
    "llama_cpp_python": "1.2.3",
    "threads": 2,
    "prompt_tokens": 8,
    "max_tokens": 2,
    "rounds": 1,
}


def run(
    *arrivals_s: Sequence[float], mode: str = BATCHED, prompt: int = 8, peak: int = 0
) -> ModeRun:
    arrivals = tuple(map(tuple, arrivals_s))
    return ModeRun(prompt, arrivals, peak, mode, steps=4, cpu_s=1.0, sleeps=2, preemptions=1)


NATIVE_RUN = NativeRun(
    "llama-batched-bench",
    prompt_tokens=8,
    generated_tokens=6,
    decoded_tokens=4,
    prefill_s=1.0,
    decode_s=0.5,
    peak_bytes=3 * 2**20,
)


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
def test_sequences_that_hardly_decoded_together_have_no_decode_rate(second: list[float]) -> None:
    assert run([1.0, 2.0], second).decode_tps is None


def test_latencies() -> None:
    measured = run([1.0, 1.5, 1.5], [2.0, 2.5, 3.0])
    assert measured.ttft_s == [1.0, 2.0]
    assert measured.itl_s == [0.5, 0.0, 0.5, 0.5]


def test_a_native_run_counts_the_first_tokens_as_generated_but_not_as_decoded() -> None:
    assert NATIVE_RUN.decode_tps == 8.0
    assert NATIVE_RUN.whole_tps == 4.0
    assert NATIVE_RUN.prefill_tps == 8.0
    assert NATIVE_RUN.ttft_s == [1.0]


def test_ratios_compare_the_runs_of_a_round() -> None:
    fast, slow = run([1.0, 2.0]), run([1.0, 3.0])
    rounds = [{BARE: fast, BATCHED: slow}, {BATCHED: fast, BARE: slow}]
    result = ratios(rounds, BARE, "decode_tps")
    assert result == {"rounds": [0.5, 2.0], "median": 1.25, "min": 0.5, "max": 2.0}


@pytest.mark.parametrize(
    ("mode", "one"),
    [
        (BATCHED, {BATCHED: run([1.0, 2.0])}),
        (BARE, {BARE: run([1.0, 2.0])}),
        (SEPARATE, {BATCHED: run([1.0, 2.0]), SEPARATE: run([1.0, 2.0], [3.0, 4.0])}),
    ],
    ids=["to itself", "without batched", "without a rate"],
)
def test_no_ratio(mode: str, one: dict[str, ModeRun]) -> None:
    assert ratios([dict(one)], mode, "decode_tps") is None


def test_mode_summary_takes_medians_of_runs_and_percentiles_of_tokens() -> None:
    mib = 2**20
    result = bench.summary(
        [run([1.0, 2.0], peak=mib), run([2.0, 4.0], peak=5 * mib), run([4.0, 8.0], peak=mib)]
    )
    assert result["decode_tps"] == 0.5
    assert result["whole_tps"] == 0.5
    assert result["prefill_tps"] == 4.0
    assert result["ttft_p50_ms"] == 2000
    assert result["itl_p50_ms"] == 2000
    assert result["itl_p99_ms"] == pytest.approx(3960)
    assert result["peak_mib"] == 5


def test_mode_summary_leaves_open_what_a_mode_cannot_tell() -> None:
    apart = run([1.0, 2.0], [3.0, 4.0], mode=SEPARATE)
    together = run([1.0, 2.0], [1.0, 2.0], mode=SEPARATE)
    assert bench.summary([apart, together])["decode_tps"] is None
    native = bench.summary([NATIVE_RUN])
    assert (native["itl_p50_ms"], native["itl_p99_ms"]) == (None, None)
    assert native["ttft_p50_ms"] == 1000


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (run([1.0, 2.0], [1.0]), r"\[2, 1\] tokens"),
        (run([1.0, 2.0]), r"\[2\] tokens"),
        (run([1.0, 2.0], [1.0, 2.0], prompt=7), "7 prompt tokens"),
        (NATIVE_RUN, "generated 6 tokens"),
    ],
)
def test_another_amount_of_work_is_an_error(wrong: ModeRun | NativeRun, message: str) -> None:
    check(run([1.0, 2.0], [1.0, 2.0]), 2, 4, 2)
    check(NATIVE_RUN, 2, 4, 3)
    with pytest.raises(BenchmarkError, match=message):
        check(wrong, 2, 4, 2)


def test_table_has_a_line_of_facts_and_a_row_for_each_mode() -> None:
    one: dict[str, AnyRun] = {
        BATCHED: run([1.0, 2.0]),
        BARE: run([1.0, 1.5], mode=BARE, peak=2**20),
        NATIVE_RUN.mode: NATIVE_RUN,
    }
    lines = table(FACTS, [summary(1, [one])]).splitlines()
    assert lines[0].startswith("A CPU, 2 cores, m.gguf (3 MB), llama-cpp-python 1.2.3, 2 threads")
    assert lines[-3].startswith("| 1 | batched | 1.0 | - | 1.0 | - | 8.0 | 1000.0 ")
    assert lines[-2].startswith("| 1 | bare | 2.0 | 0.50 (0.50-0.50) | 1.3 | 0.75 (0.75-0.75) |")
    assert lines[-2].endswith(" 1 |")
    assert lines[-1].endswith("| 1000.0 | - | - | 3 |")
    assert {line.count("|") for line in lines[2:]} == {12}


def test_plot_has_a_chart_for_each_figure_and_a_line_for_each_mode() -> None:
    rounds: list[Round] = [{BATCHED: run([1.0, 2.0]), NATIVE_RUN.mode: NATIVE_RUN}]
    root = ElementTree.fromstring(plot(FACTS, [summary(n, rounds) for n in (1, 2)]))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"tokens/s, whole run", "TTFT p50, ms", "peak memory, MiB", "batched"} <= set(texts)
    points = [
        len((e.get("points") or "").split()) for e in root.iter() if e.get("points") is not None
    ]
    assert points == [2, 2, 2, 2, 2, 2, 2, 0, 2, 0, 2, 2]  # no ITL of llama-batched-bench


@pytest.mark.parametrize(
    "bad",
    [
        ["--sequences", "0"],
        ["--sequences", "1,x"],
        ["--rounds", "0"],
        ["--max-tokens", "1"],
        ["--modes", "batched,best"],
    ],
    ids=repr,
)
def test_arguments_are_bounded(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--model", "m.gguf", *bad])
    assert bad[0] in capsys.readouterr().err


def test_arguments() -> None:
    settings, json_file, plot_file = parse_args(
        ["--model", "m.gguf", "--sequences", "1,3", "--json", "out", "--plot", "out.svg"]
    )
    assert settings.sequences == (1, 3)
    assert settings.modes == (BARE, BATCHED)
    assert settings.options(3).n_slots == 3
    assert settings.options(3).n_ctx_slot > settings.prompt_tokens + settings.max_tokens
    assert (json_file, plot_file) == (Path("out"), Path("out.svg"))
    assert Settings(Path("m"), (BARE,), (1,), 4, 2, 1, 1).batched_bench is None
