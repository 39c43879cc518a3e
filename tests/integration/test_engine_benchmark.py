"""The engine benchmark on a tiny model: the same work on both sides, and honest sums."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from loadtests.engine import main

PROMPT_TOKENS, MAX_TOKENS = 20, 24


@pytest.fixture(scope="module")
def report(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one small invocation wrote."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    sizes = f"--slots 1,2 --prompt-tokens {PROMPT_TOKENS} --max-tokens {MAX_TOKENS}"
    rest = ["--pairs", "1", "--threads", "1", "--json", str(path)]
    main(["--model", str(tiny_gguf), *sizes.split(), *rest])
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_both_sides_did_the_same_work(report: dict[str, Any]) -> None:
    assert [result["slots"] for result in report["results"]] == [1, 2]
    for result in report["results"]:
        slots = result["slots"]
        assert sorted(run["side"] for run in result["runs"]) == ["bare", "engine"]
        for run in result["runs"]:
            assert run["prompt_tokens"] == slots * PROMPT_TOKENS
            assert run["generated_tokens"] == slots * MAX_TOKENS
            assert [len(times) for times in run["arrivals_s"]] == [MAX_TOKENS] * slots
            # The prompts fit into one step, which gives the first tokens.
            assert run["steps"] == MAX_TOKENS


def test_figures_come_from_the_listed_runs(report: dict[str, Any]) -> None:
    for result in report["results"]:
        runs = {run["side"]: run for run in result["runs"]}
        for run in runs.values():
            wall_s = max(times[-1] for times in run["arrivals_s"])
            assert run["whole_tps"] == pytest.approx(run["generated_tokens"] / wall_s)
            for name in ("decode_tps", "whole_tps", "prefill_tps"):
                assert result[run["side"]][name] == run[name]
        for ratio, rate in (("decode_ratio", "decode_tps"), ("whole_ratio", "whole_tps")):
            expected = runs["engine"][rate] / runs["bare"][rate]
            assert result[ratio]["pairs"] == [pytest.approx(expected)]
            assert result[ratio]["median"] == pytest.approx(expected)


def test_report_says_what_was_measured(report: dict[str, Any], tiny_gguf: Path) -> None:
    machine = report["machine"]
    assert machine["model"] == tiny_gguf.name
    assert (machine["prompt_tokens"], machine["max_tokens"]) == (PROMPT_TOKENS, MAX_TOKENS)
    assert machine["threads"] == 1
    engine = report["results"][1]["engine"]
    ttft_ms = [
        1000 * times[0]
        for run in report["results"][1]["runs"]
        if run["side"] == "engine"
        for times in run["arrivals_s"]
    ]
    assert engine["ttft_p50_ms"] == pytest.approx(statistics.median(ttft_ms))
    assert 0 < engine["itl_p50_ms"] <= engine["itl_p99_ms"]
