"""The HTTP comparison with the sides that need neither Ray nor a compiler, on a tiny model."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp
import pytest

from loadtests.common import bursts
from loadtests.compare import __main__, llama_server, sides
from loadtests.compare.requests import MAX_TOKENS, WORKLOADS, read_words, request
from serve_app.cli.measure.benchmark import BenchmarkError, percentile
from serve_app.store.builtin_model import BUILTIN_MODEL

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one round wrote. Of the built-in model: a tiny one's whole answer takes 25 ms, and may come to a
    busy client in one piece, which is no stream."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    rest = ["--sides", "corral", "--users", "1,3", "--rounds", "1", "--threads", "1"]
    with mock.patch.object(__main__, "REST_S", 0.0):
        __main__.main(["--model", str(BUILTIN_MODEL), *rest, "--json", str(path)])
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_every_burst_was_answered_in_full(document: dict[str, Any]) -> None:
    runs = document["runs"]
    assert [(run["side"], run["workload"], run["users"]) for run in runs] == [
        ("corral", workload, users) for workload in ("shared", "independent") for users in (1, 3)
    ]
    for run in runs:
        assert run["tokens"] == run["users"] * MAX_TOKENS
        n_prompt = sum(WORKLOADS[run["workload"]])
        for answer in run["answers"]:
            assert (answer["tokens"], answer["counted"]) == (MAX_TOKENS, True)
            assert answer["prompt_tokens"] == n_prompt
            assert answer["error"] is None
            assert 1 <= len(answer["pieces_s"]) <= MAX_TOKENS


def test_only_the_shared_prefix_was_cached(document: dict[str, Any]) -> None:
    cached = [sorted(a["cached_tokens"] for a in run["answers"]) for run in document["runs"]]
    n_shared, _ = WORKLOADS["shared"]
    assert cached == [[0], [0, n_shared, n_shared], [0], [0, 0, 0]]


def test_figures_come_from_the_streams(document: dict[str, Any]) -> None:
    for run in document["runs"]:
        times = [answer["pieces_s"] for answer in run["answers"]]
        assert all(of_one == sorted(of_one) for of_one in times)
        assert max(of_one[-1] for of_one in times) <= run["wall_s"]
        assert run["tokens_per_s"] == pytest.approx(run["tokens"] / run["wall_s"])
        assert run["ttft_p50_s"] == pytest.approx(percentile([t[0] for t in times], 50))
        assert 0 < run["client_cpu_s"] <= run["wall_s"] * 1.01


def test_document_says_what_was_measured(document: dict[str, Any]) -> None:
    machine = document["machine"]
    assert machine["model"] == BUILTIN_MODEL.name
    assert machine["sizes"] == {"threads": 1, "n_slots": 16, "n_ctx_slot": 1024, "n_batch": 512}
    assert len({run["seed"] for run in document["runs"]}) == len(document["runs"])


@pytest.mark.parametrize("side", [sides.PYTHON, sides.PYTHON_BATCHED])
def test_servers_of_llama_cpp_python_answer_in_full(
    side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    example = llama_server.folder() / llama_server.BATCHED_SERVER
    if side == sides.PYTHON_BATCHED and not example.is_file():
        pytest.skip("python -m loadtests.compare.llama_server has not run here")
    sizes = sides.Sizes(threads=1, n_slots=2)
    with sides.start(side, BUILTIN_MODEL, sizes, Path()) as server:
        rest = [
            "--sides",
            server.url,
            "--users",
            "2",
            "--rounds",
            "1",
            "--workloads",
            "independent",
        ]
        with mock.patch.object(__main__, "REST_S", 0.0):
            __main__.main(["--model", str(BUILTIN_MODEL), *rest])
    out = capsys.readouterr().out
    assert f"| 2 | {server.url} | " in out
    assert f"{server.url} serves " in out
    (warning,) = (line for line in out.splitlines() if line.startswith("WARNING"))
    assert "does not count all its tokens" in warning  # and it answered no fewer


def test_words_are_one_token_each(tiny_gguf: Path) -> None:
    words = read_words(tiny_gguf)
    assert len(words.tokens) > 100
    with closing(llama_cpp.Llama(str(tiny_gguf), vocab_only=True, verbose=False)) as model:
        text = "".join(words.tokens.values()).encode()
        assert model.tokenize(text, add_bos=False) == list(words.tokens)
        assert model.token_eos() in words.eog


def test_a_refused_request_ends_the_measurement(tiny_gguf: Path) -> None:
    sizes = sides.Sizes(threads=1, n_slots=1, n_ctx_slot=64)
    with (
        sides.start(sides.CORRAL, tiny_gguf, sizes, Path()) as server,
        pytest.raises(BenchmarkError, match="context_length_exceeded"),
    ):
        bursts.run(server.url, [request((1,) * 64, 0)])
