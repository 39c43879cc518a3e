"""A rolling `serve deploy` puts another model, with another vocabulary, in a model's place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster.test_failover import EXACT, RESTART_TIMEOUT_S
from tests.e2e.conftest import Corral, all_the_time, model, sse, wait_until
from tools.random_models.model import SHAPES, write_random_gguf

N_TEXTS, N_ENDLESS = 3, 2
READ_EVERY_S = 0.2
pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Of `gguf`'s shape, with as many tokens; its words are other words, or none."""
    path = tmp_path / "other.gguf"
    control = [f"<|{number}|>" for number in range(200)]
    write_random_gguf(path, SHAPES["tiny"], "q8_0", seed=1, more_control=control)
    return path


class Clients:
    """They ask, and keep what was answered."""

    def __init__(self, corral: Corral) -> None:
        self._url = corral.url
        self.over = threading.Event()
        """Set when nothing is to be read slowly any more."""
        self.begun = [threading.Event() for _ in range(N_ENDLESS)]
        self.answers: list[tuple[int, httpx.Response]] = []

    def post(self, number: int) -> httpx.Response:
        """A text that goes on, or the vector of one: every third."""
        text = f"The water and the people of number {number} say"
        body: dict[str, Any] = {"prompt": text, "max_tokens": 40, "temperature": 0}
        path = "completions"
        if number % 3 == 2:
            path, body = "embeddings", {"input": text}
        return httpx.post(f"{self._url}/v1/{path}", json=body, timeout=120)

    def ask(self, number: int) -> None:
        self.answers.append((number, self.post(number)))

    def endless(self, number: int) -> list[Any]:
        """A stream that goes on for longer than the deploy takes; the errors in it. It is read slowly: what
        it costs to write and to read each token would hold the deploy up."""
        body = {"prompt": f"For ever {number}", "max_tokens": 1_000_000, "context_shift": True}
        body |= {"ignore_eos": True, "stream": True}
        errors = []
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=body, timeout=120
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.begun[number].set()
                    chunk = sse(line)
                    errors += [chunk["error"]] if "error" in chunk else []
                    assert bool(errors) != ("choices" in chunk), chunk
                    self.over.wait(READ_EVERY_S)
        return errors


def said(answer: httpx.Response) -> Any:
    """The text, or the vector."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["text"] if "choices" in found else found["data"][0]["embedding"]


def test_no_engine_takes_tokens_of_the_other_vocabulary(
    gguf: Path, other: Path, start: Callable[[list[dict[str, Any]]], Corral]
) -> None:
    served = model(gguf, "m", n_slots=8, n_ctx_slot=512, max_waiting=32, **EXACT)
    served["serve"] |= {"num_replicas": 2, "graceful_shutdown_timeout_s": 1}
    corral = start([served])
    corral.wait_ready()

    def replicas() -> set[str]:
        models = corral.http.get("/v1/stats").json().get("models", [])
        return {replica["replica_id"] for one in models for replica in one["replicas"]}

    wait_until(lambda: len(replicas()) == 2, RESTART_TIMEOUT_S, "two replicas")
    clients, before = Clients(corral), replicas()
    old = [said(clients.post(number)) for number in range(N_TEXTS)]
    with ThreadPoolExecutor(N_ENDLESS) as pool:
        reading = [pool.submit(clients.endless, number) for number in range(N_ENDLESS)]
        assert all(begun.wait(60) for begun in clients.begun)
        with all_the_time(clients.ask, N_TEXTS):
            corral.deploy(other)
            wait_until(
                lambda: len(replicas()) == 2 and not before & replicas(),
                RESTART_TIMEOUT_S,
                "two other replicas",
            )
        clients.over.set()
        ends = [one.result(120) for one in reading]
    new = [said(clients.post(number)) for number in range(N_TEXTS)]
    assert all(one != another for one, another in zip(old, new, strict=True))
    for number, answer in clients.answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "engine_unavailable"
        else:
            assert said(answer) in (old[number], new[number])
    for errors in ends:
        (error,) = errors
        assert error["code"] == "engine_unavailable"
        assert "being replaced" in error["message"]
