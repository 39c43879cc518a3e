"""The engine benchmark on a tiny model: the same work in every mode, and honest sums."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from loadtests.engine.__main__ import main
from loadtests.engine.modes import BARE, mode_process
from serve_app.cli.measure.benchmark import BenchmarkError, percentile
from serve_app.engine import EngineOptions

pytestmark = pytest.mark.long

PROMPT_TOKENS, MAX_TOKENS = 20, 24
MODES = ["separate", "round-robin", "bare", "batched"]


@pytest.fixture(scope="module")
def folder(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one small invocation wrote its report and its plot."""
    folder = tmp_path_factory.mktemp("report")
    sizes = f"--sequences 1,2 --prompt-tokens {PROMPT_TOKENS} --max-tokens {MAX_TOKENS}"
    rest = ["--modes", ",".join(MODES), "--rounds", "1", "--threads", "1"]
    files = ["--json", str(folder / "report.json"), "--plot", str(folder / "plot.svg")]
    main(["--model", str(tiny_gguf), *sizes.split(), *rest, *files])
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """What the invocation wrote."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_every_mode_did_the_same_work(report: dict[str, Any]) -> None:
    assert [result["sequences"] for result in report["results"]] == [1, 2]
    for result in report["results"]:
        n = result["sequences"]
        assert [run["mode"] for run in result["runs"]] == MODES
        for run in result["runs"]:
            assert run["prompt_tokens"] == n * PROMPT_TOKENS
            assert run["generated_tokens"] == n * MAX_TOKENS
            assert [len(times) for times in run["arrivals_s"]] == [MAX_TOKENS] * n
            # The prompts fit into one step of each context, which gives the first tokens.
            alone = run["mode"] in ("separate", "round-robin")
            assert run["steps"] == MAX_TOKENS * (n if alone else 1)


def test_figures_come_from_the_listed_runs(report: dict[str, Any]) -> None:
    for result in report["results"]:
        runs = {run["mode"]: run for run in result["runs"]}
        for mode, run in runs.items():
            wall_s = max(times[-1] for times in run["arrivals_s"])
            assert run["whole_tps"] == pytest.approx(run["generated_tokens"] / wall_s)
            figures = result["modes"][mode]
            for name in ("decode_tps", "whole_tps", "prefill_tps"):
                assert figures[name] == run[name]
            assert figures["peak_mib"] == run["peak_bytes"] / 2**20
        for ratio, rate in (("decode_ratio", "decode_tps"), ("whole_ratio", "whole_tps")):
            batched, bare = runs["batched"][rate], runs["bare"][rate]
            found = result["modes"]["bare"][ratio]
            if batched is None or bare is None:  # so tiny a model may decode too fast to be seen
                assert found is None
            else:
                assert found["rounds"] == [pytest.approx(batched / bare)]
                assert found["median"] == pytest.approx(batched / bare)


def test_peak_memory_is_of_the_modes_own_process(report: dict[str, Any], tiny_gguf: Path) -> None:
    peaks = {
        (result["sequences"], run["mode"]): run["peak_bytes"]
        for result in report["results"]
        for run in result["runs"]
    }
    assert min(peaks.values()) > tiny_gguf.stat().st_size
    assert peaks[2, "separate"] > peaks[1, "separate"]  # a context more


def test_report_says_what_was_measured(report: dict[str, Any], tiny_gguf: Path) -> None:
    machine = report["machine"]
    assert machine["model"] == tiny_gguf.name
    assert (machine["prompt_tokens"], machine["max_tokens"]) == (PROMPT_TOKENS, MAX_TOKENS)
    assert machine["threads"] == 1
    batched = report["results"][1]["modes"]["batched"]
    arrivals_s = [
        times
        for run in report["results"][1]["runs"]
        if run["mode"] == "batched"
        for times in run["arrivals_s"]
    ]
    ttft_ms = [1000 * times[0] for times in arrivals_s]
    gaps_ms = [1000 * (b - a) for times in arrivals_s for a, b in pairwise(times)]
    assert batched["ttft_p50_ms"] == pytest.approx(statistics.median(ttft_ms))
    assert batched["itl_p50_ms"] == pytest.approx(statistics.median(gaps_ms))
    assert batched["itl_p99_ms"] == pytest.approx(percentile(gaps_ms, 99))


def test_the_plot_names_every_mode(folder: Path) -> None:
    root = ElementTree.parse(folder / "plot.svg").getroot()
    assert set(MODES) <= {element.text for element in root.iter()}


def test_a_mode_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    options = EngineOptions(n_slots=1, n_ctx_slot=64, threads=1)
    with (
        mode_process(BARE, tmp_path / "none.gguf", options) as mode,
        pytest.raises(BenchmarkError, match="The bare mode failed"),
    ):
        mode.run([(1, 2)], 8)
