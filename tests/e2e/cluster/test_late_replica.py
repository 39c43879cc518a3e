"""One of two replicas stands still, and everything that asks all of them is answered all the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Corral, model, sse, wait_until

START_TIMEOUT_S = 90
PATIENCE_S = 10
"""A look gives up on a replica after 2 seconds."""
pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def corral(gguf: Path, start_for_module: Callable[[list[dict[str, Any]]], Corral]) -> Corral:
    """Two replicas."""
    served = model(gguf, "m", n_slots=2, n_ctx_slot=512)
    served["serve"]["num_replicas"] = 2
    corral = start_for_module([served])
    corral.wait_ready()
    wait_until(lambda: len(corral.replicas()) == 2, START_TIMEOUT_S, "two replicas")
    return corral


@contextmanager
def one_stopped(corral: Corral) -> Iterator[None]:
    """Meanwhile, a replica's process does nothing: for less than Serve takes to replace it."""
    victim, *_ = corral.pids("ray::ServeReplica:corral:engine-m")
    os.kill(victim, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(victim, signal.SIGCONT)


def test_all_questions_are_answered(corral: Corral) -> None:
    ids = {replica["replica_id"] for replica in corral.replicas()}
    asked = {"prompt": "A", "max_tokens": 4, "temperature": 0}
    done = [corral.http.post("/v1/completions", json=asked).json()["id"] for _ in range(8)]
    with (
        httpx.Client(base_url=corral.url, timeout=PATIENCE_S) as http,
        one_stopped(corral),
        ThreadPoolExecutor(40) as pool,
    ):
        stats = list(pool.map(lambda _: http.get("/v1/stats"), range(40)))
        assert {answer.status_code for answer in stats} == {200}
        (told,) = stats[0].json()["models"]
        (missing,) = told["missing"]
        assert {missing, told["replicas"][0]["replica_id"]} == ids
        slots = http.get("/slots")
        assert (slots.status_code, slots.headers["x-corral-missing"]) == (200, missing)
        assert {slot["replica_id"] for slot in slots.json()} == ids - {missing}
        props = http.get("/props").json()
        assert (props["total_slots"], props["missing"]) == (2, [missing])
        metrics = http.get("/metrics")
        assert metrics.status_code == 200
        assert "corral_replicas_missing 1.0" in metrics.text.splitlines()
        found = list(pool.map(lambda answer_id: http.get(f"/v1/requests/{answer_id}"), done))
        assert {answer.status_code for answer in found} <= {200, 404}
        for answer in found:
            assert missing in answer.text  # in `missing`, or in the message
        with http.stream("GET", "/v1/live") as live:
            first = sse(next(line for line in live.iter_lines() if line.startswith("data:")))
        assert first["models"]["m"]["missing"] == [missing]
    wait_until(lambda: len(corral.replicas()) == 2, PATIENCE_S, "both answer again")
    assert {replica["replica_id"] for replica in corral.replicas()} == ids
