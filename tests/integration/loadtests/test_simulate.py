"""The simulation on a tiny model: every answer is there, and a shared prompt is computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.engine.simulate import main

CLIENTS, REQUESTS, SHARED, OWN = 4, 2, 256, 8


@pytest.fixture(scope="module")
def results(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one invocation found: without and with a shared prompt, continuous or not."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    counts = f"--clients {CLIENTS} --slots 2 --requests {REQUESTS} --prompt-tokens {OWN}"
    lists = f"--shared 0,{SHARED} --continuous on,off --min-tokens 4 --max-tokens 12 --threads 1"
    main(["--model", str(tiny_gguf), *counts.split(), *lists.split(), "--json", str(path)])
    results: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return results


def test_every_scenario_answers_the_same_requests(results: list[dict[str, Any]]) -> None:
    shapes = [(r["scenario"]["shared_tokens"], r["scenario"]["continuous"]) for r in results]
    assert shapes == [(0, True), (0, False), (SHARED, True), (SHARED, False)]
    lengths = [
        {a["request_id"]: a["usage"]["completion_tokens"] for a in result["answers"]}
        for result in results
    ]
    assert all(of_one == lengths[0] for of_one in lengths)
    for result in results:
        n = CLIENTS * REQUESTS
        assert (result["requests"], len(result["answers"])) == (n, n)
        assert result["prompt_tokens"] == n * (OWN + result["scenario"]["shared_tokens"])
        assert result["generated_tokens"] == sum(lengths[0].values())
        assert all(4 <= n_tokens <= 12 for n_tokens in lengths[0].values())
        for answer in result["answers"]:
            assert len(answer["arrivals_s"]) == answer["usage"]["completion_tokens"]


def test_a_shared_prompt_is_computed_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        cached = sorted(answer["usage"]["cached_tokens"] for answer in result["answers"])
        if result["scenario"]["shared_tokens"]:
            assert cached[0] == 0
            assert all(n >= SHARED for n in cached[1:])
            assert result["cache_hits"] > 0.7
        else:
            assert sum(cached) < CLIENTS * REQUESTS * OWN
            assert result["cache_hits"] < 0.2
