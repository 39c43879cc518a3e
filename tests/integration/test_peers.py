"""The HTTP comparison with the one side that needs neither Ray nor llama-server, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from loadtests import bursts, peer_sides, peers
from loadtests.common import percentile
from loadtests.engine_run import BenchmarkError


@pytest.fixture(scope="module")
def document(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one round wrote."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    rest = ["--sides", "bare", "--users", "1,3", "--rounds", "1", "--threads", "1"]
    with mock.patch.object(peers, "REST_S", 0.0):
        peers.main(["--model", str(tiny_gguf), *rest, "--json", str(path)])
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_every_burst_was_answered_in_full(document: dict[str, Any]) -> None:
    runs = document["runs"]
    assert [(run["side"], run["workload"], run["users"]) for run in runs] == [
        ("bare", workload, users) for workload in ("shared", "independent") for users in (1, 3)
    ]
    for run in runs:
        assert run["tokens"] == run["users"] * peers.MAX_TOKENS
        n_prompt = sum(peers.WORKLOADS[run["workload"]])
        for answer in run["answers"]:
            assert (answer["tokens"], answer["counted"]) == (peers.MAX_TOKENS, True)
            assert answer["prompt_tokens"] == n_prompt
            assert answer["error"] is None
            assert 1 <= len(answer["pieces_s"]) <= peers.MAX_TOKENS


def test_only_the_shared_prefix_was_cached(document: dict[str, Any]) -> None:
    cached = [sorted(a["cached_tokens"] for a in run["answers"]) for run in document["runs"]]
    n_shared, _ = peers.WORKLOADS["shared"]
    assert cached == [[0], [0, n_shared, n_shared], [0], [0, 0, 0]]


def test_figures_come_from_the_streams(document: dict[str, Any]) -> None:
    for run in document["runs"]:
        times = [answer["pieces_s"] for answer in run["answers"]]
        assert all(of_one == sorted(of_one) for of_one in times)
        assert max(of_one[-1] for of_one in times) <= run["wall_s"]
        assert run["tokens_per_s"] == pytest.approx(run["tokens"] / run["wall_s"])
        assert run["ttft_p50_s"] == pytest.approx(percentile([t[0] for t in times], 50))
        assert 0 < run["client_cpu_s"] <= run["wall_s"] * 1.01


def test_document_says_what_was_measured(document: dict[str, Any], tiny_gguf: Path) -> None:
    machine = document["machine"]
    assert machine["model"] == tiny_gguf.name
    assert machine["sizes"] == {"threads": 1, "n_slots": 16, "n_ctx_slot": 1024, "n_batch": 512}
    assert len({run["seed"] for run in document["runs"]}) == len(document["runs"])


def test_a_refused_request_ends_the_measurement(tiny_gguf: Path) -> None:
    sizes = peer_sides.Sizes(threads=1, n_slots=1, n_ctx_slot=64)
    with (
        peer_sides.start(peer_sides.BARE, tiny_gguf, sizes, Path()) as url,
        pytest.raises(BenchmarkError, match="context_length_exceeded"),
    ):
        bursts.run(url, [peers.request((1,) * 64, 0)])
