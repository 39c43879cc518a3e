"""A server without options takes requests longer than a slot's share, beside others."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.conftest import Corral, model, sse
from tools.random_models.model import SHAPES, write_random_gguf

LONGEST = 8 * 4096
SHAPE = replace(SHAPES["tiny"], n_ctx_train=2 * LONGEST)


@pytest.fixture(scope="module")
def server(
    start_for_module: Callable[..., Corral], tmp_path_factory: pytest.TempPathFactory
) -> Corral:
    path = tmp_path_factory.mktemp("model") / "long.gguf"
    write_random_gguf(path, SHAPE, "q8_0")
    server = start_for_module([model(path, "long")], local=True)
    server.wait_ready()
    return server


def prompt(n: int, first: int = 0) -> list[int]:
    return [100 + (first + i * i) % 400 for i in range(n)]


def body(tokens: list[int], n: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": tokens, "max_tokens": n, "ignore_eos": True, "temperature": 0, **fields}


def test_every_route_tells_the_longest_request(server: Corral) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["n_ctx_slot"] == LONGEST
    assert server.http.get("/props").json()["default_generation_settings"]["n_ctx"] == LONGEST
    shown = server.http.post("/api/show", json={"model": "long"}).json()
    assert f"{LONGEST}" in shown["parameters"]
    assert LONGEST in shown["model_info"].values()
    refused = server.http.post("/v1/completions", json=body(prompt(LONGEST), 1))
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (LONGEST, LONGEST)


def test_a_long_request_beside_streams_and_its_next_turn(server: Corral) -> None:
    """All streams have all of their tokens; the next turn computes only what is new. The cache may
    have been unified before: what was measured or learned decides its kind at the start."""

    def streamed(first: int) -> int:
        request = body(prompt(30, first), 400, stream=True)
        with server.http.stream("POST", "/v1/completions", json=request) as response:
            events = [sse(line) for line in response.iter_lines() if line.startswith("data: {")]
        assert not any("error" in event for event in events)
        return sum(len(event["choices"]) for event in events)

    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(streamed, first) for first in (1, 2)]
        long = prompt(6000)
        answer = server.http.post("/v1/completions", json=body(long, 8, return_tokens=True))
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] == 6000
        for stream in streams:
            assert stream.result() >= 1
    assert server.stats()["compute"]["kv_unified"]
    turn = [*long, *prompt(20, 3)]
    usage = server.http.post("/v1/completions", json=body(turn, 4)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6000
    stats = server.stats()
    assert stats["requests"]["ended"] == {"length": 4}
    assert stats["tokens"]["generated_tokens"] == 2 * 400 + 8 + 4
