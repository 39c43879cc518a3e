"""A new replica gets what requests share, and one that leaves gives away what only it has."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Corral, all_the_time, model, settings, wait_until

SCALE_TIMEOUT_S = 90
SYSTEM = " ".join(f"Rule {i} of this application is to be kept." for i in range(20))
NAMES = ["Ana", "Ben", "Eva", "Leo", "Mia", "Zoe"]
CONVERSATIONS = [f"{one}: " + " ".join(f"{one} says {i}." for i in range(30)) for one in NAMES]
RECEIVED = r"Received \d+ prefix\S*, [\d,]+ tokens, .* from 1 replica "
SENT = r"Sent \d+ prefix\S*, [\d,]+ tokens, .* to 1 replica "
pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


@pytest.fixture(scope="module")
def corral(gguf: Path, start_for_module: Callable[[list[dict[str, Any]]], Corral]) -> Corral:
    """One or two replicas, as the load is."""
    served = model(gguf, "tiny", n_slots=2, n_ctx_slot=1024, max_waiting=64, cache_ram_mib=256)
    served["serve"]["autoscaling_config"] = {
        "min_replicas": 1,
        "max_replicas": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 3,
        "look_back_period_s": 11,
    }
    with settings({"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}):
        corral = start_for_module([served])
    corral.wait_ready()
    return corral


def replicas(corral: Corral) -> dict[str, dict[str, Any]]:
    """Every replica's engine statistics."""
    found = corral.http.get("/v1/stats").json()["models"][0]["replicas"]
    return {replica["replica_id"]: replica["engine"] for replica in found}


def ask(corral: Corral, prompt: str, max_tokens: int = 4) -> tuple[int, str]:
    """Run a prompt; returns how many of its tokens were cached, and the answer."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    answer = corral.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer.json()["choices"][0]["text"]


def test_prefixes_come_and_go_with_replicas(corral: Corral) -> None:
    expected = [ask(corral, SYSTEM + f" Question {i}?") for i in range(3)]
    n_shared = expected[-1][0]
    assert n_shared > 100
    (source,) = replicas(corral)

    # Long answers: the last 128 prompts, which the new one is told of, must still have the first ones.
    with all_the_time(lambda client: ask(corral, f"{client}: hello", 800), 8):
        wait_until(lambda: len(replicas(corral)) == 2, SCALE_TIMEOUT_S, "a second replica")
        grown = replicas(corral)
        (fresh,) = set(grown) - {source}
        assert grown[fresh]["cache"]["received_prefixes"] >= 1
        assert grown[fresh]["cache"]["received_bytes"] > 0
        assert grown[source]["cache"]["sent_prefixes"] >= 1
    assert re.search(RECEIVED, corral.log)

    # Whichever replica gets it, it starts from what requests share, and says the same.
    for i in range(8):
        cached, text = ask(corral, SYSTEM + f" Question {i % 3}?")
        assert cached >= n_shared
        assert text == expected[i % 3][1]
    assert replicas(corral)[fresh]["tokens"]["restored_tokens"] >= n_shared

    # What only the one that leaves has is found where they come next.
    with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:
        list(pool.map(lambda text: ask(corral, text), CONVERSATIONS))
    shares = [stats["requests"]["ended"]["length"] for stats in replicas(corral).values()]
    assert min(shares) > 0
    wait_until(lambda: bool(re.search(SENT, corral.log)), SCALE_TIMEOUT_S, "one has left")
    (left,) = replicas(corral).values()
    assert left["cache"]["received_prefixes"] >= 1
    assert min(ask(corral, text + " And then?")[0] for text in CONVERSATIONS) >= 96
    for trouble in ("no more prefixes", "is refused", "Traceback", "never awaited"):
        assert trouble not in corral.log
