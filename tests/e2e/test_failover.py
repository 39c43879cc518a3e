"""Replicas are lost in mid-stream, and no client notices but for a pause."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Corral, model, sse, wait_until

N_STREAMS = 12
N_TOKENS = 600
RESTART_TIMEOUT_S = 90
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def corral(gguf: Path, start_for_module: Callable[[list[dict[str, Any]]], Corral]) -> Corral:
    """Two replicas, whose texts do not depend on what is computed together."""
    served = model(gguf, "m", n_slots=4, n_ctx_slot=1024, flash_attn=False, max_waiting=32)
    served["deployment"]["num_replicas"] = 2
    corral = start_for_module([served])
    corral.wait_ready()
    wait_until(lambda: len(corral.replicas()) == 2, RESTART_TIMEOUT_S, "two replicas")
    return corral


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": f"Stream number {number} says",
        "max_tokens": N_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def whole(corral: Corral, number: int) -> str:
    answer = corral.http.post("/v1/completions", json=body(number)).json()
    text: str = answer["choices"][0]["text"]
    return text


def streamed(corral: Corral, number: int, began: Callable[[], None]) -> tuple[str, dict[str, Any]]:
    """The text of a stream, and what is told of the request."""
    text, chunks = "", list[dict[str, Any]]()
    asked = body(number) | {"stream": True, "stream_options": {"include_usage": True}}
    with corral.http.stream("POST", "/v1/completions", json=asked) as response:
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                chunks.append(sse(line))
                assert "error" not in chunks[-1], chunks[-1]
                text += "".join(choice["text"] for choice in chunks[-1]["choices"])
                began()
    assert chunks[-1]["usage"]["completion_tokens"] == N_TOKENS
    (told,) = corral.http.get(f"/v1/requests/{chunks[0]['id']}").json()["sequences"]
    return text, told


def test_streams_go_on_without_a_missing_or_repeated_character(corral: Corral) -> None:
    numbers = range(N_STREAMS)
    with ThreadPoolExecutor(N_STREAMS) as pool:
        alone = list(pool.map(lambda number: whole(corral, number), numbers))
        begun = [False] * N_STREAMS
        futures = [
            pool.submit(streamed, corral, i, lambda i=i: begun.__setitem__(i, True))
            for i in numbers
        ]
        wait_until(lambda: sum(begun) >= 8, 60, "eight streams")
        victim, *_ = corral.pids("ray::ServeReplica:corral:engine-m")
        os.kill(victim, signal.SIGKILL)
        found = [future.result(180) for future in futures]
    assert [text for text, _ in found] == alone
    resumed = [told["timings"] for _, told in found if told["timings"]["failovers"]]
    assert resumed
    assert all(timings["failed_over_ms"] > 0 for timings in resumed)
    assert all(told["finish_reason"] == "length" for _, told in found)
    wait_until(lambda: len(corral.replicas()) == 2, RESTART_TIMEOUT_S, "two replicas again")
