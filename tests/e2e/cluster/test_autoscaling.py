"""Replicas come with work and go with it; no request fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Corral, all_the_time, model, settings, wait_until

SCALE_TIMEOUT_S = 90
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def corral(gguf: Path, start_for_module: Callable[[list[dict[str, Any]]], Corral]) -> Corral:
    """Two models: "busy" always has a replica, "rare" only when it is asked."""
    served = [model(gguf, name, n_slots=2, n_ctx_slot=1024) for name in ("busy", "rare")]
    for one, (least, most) in zip(served, ((1, 2), (0, 1)), strict=True):
        one["engine"]["max_waiting"] = 64
        one["serve"]["autoscaling_config"] = {
            "min_replicas": least,
            "max_replicas": most,
            "upscale_delay_s": 1,
            "downscale_delay_s": 3,
            "look_back_period_s": 11,
        }
    with settings({"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}):
        corral = start_for_module(served)

    def ready() -> bool:
        try:
            return len(replicas(corral, "busy")) == 1
        except (httpx.TransportError, KeyError, ValueError):
            return False

    wait_until(ready, SCALE_TIMEOUT_S, lambda: f"server ready:\n{corral.log}")
    return corral


def replicas(corral: Corral, model_id: str) -> dict[str, int]:
    """What each replica has generated."""
    models = corral.http.get("/v1/stats").json()["models"]
    (found,) = [entry["replicas"] for entry in models if entry["id"] == model_id]
    return {
        replica["replica_id"]: replica["engine"]["tokens"]["generated_tokens"] for replica in found
    }


def complete(corral: Corral, model_id: str, prompt: str, max_tokens: int) -> int:
    """The answer's status."""
    body = {"model": model_id, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return corral.http.post("/v1/completions", json=body).status_code


@contextmanager
def asking(corral: Corral, n_clients: int, max_tokens: int) -> Iterator[None]:
    """Meanwhile, clients ask "busy" all the time; every answer must be a good one."""
    statuses = list[int]()

    def ask(client: int) -> None:
        statuses.append(complete(corral, "busy", f"{client}: hello", max_tokens))

    with all_the_time(ask, n_clients):
        yield
    assert set(statuses) == {200}


@pytest.mark.long
def test_a_burst_brings_a_replica_and_rest_takes_it_away(corral: Corral) -> None:
    def busy() -> dict[str, int]:
        return replicas(corral, "busy")

    with asking(corral, 8, 200):
        wait_until(lambda: sum(n > 0 for n in busy().values()) == 2, SCALE_TIMEOUT_S, "two answer")
    with asking(corral, 1, 1):
        wait_until(lambda: len(busy()) == 1, SCALE_TIMEOUT_S, "one is left")


@pytest.mark.long
def test_a_request_brings_the_first_replica(corral: Corral) -> None:
    assert replicas(corral, "rare") == {}
    assert complete(corral, "rare", "hello", 4) == 200
    wait_until(lambda: replicas(corral, "rare") == {}, SCALE_TIMEOUT_S, "none is left")
