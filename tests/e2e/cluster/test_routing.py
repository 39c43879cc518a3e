"""Three real replicas behind the real router."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Corral, model, wait_until

pytestmark = pytest.mark.long
N_REPLICAS = 3
INGRESS = "ray::ServeReplica:corral:Ingress"
REPORTS_TAKE_S = 3.0
"""Until routers know by reports what replicas hold, and no more by what they have sent."""


@pytest.fixture(scope="module")
def fleet(gguf: Path, start_for_module: Callable[[list[dict[str, Any]]], Corral]) -> Corral:
    served = model(gguf, "tiny", n_slots=4, n_ctx_slot=1024, max_waiting=16)
    served["serve"]["num_replicas"] = N_REPLICAS
    corral = start_for_module([served])
    corral.wait_ready()
    wait_until(lambda: len(replicas(corral)) == N_REPLICAS, 60, "all replicas up")
    return corral


def replicas(corral: Corral) -> dict[str, dict[str, Any]]:
    """Every replica's engine statistics."""
    return {replica["replica_id"]: replica["engine"] for replica in corral.replicas()}


def ask(corral: Corral, prompt: str, max_tokens: int = 4) -> int:
    """Run a prompt; returns how many of its tokens were cached."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = corral.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def conversation(name: str) -> str:
    return f"{name}: " + " ".join(f"{name} says {i}." for i in range(50))


def test_who_comes_back_finds_what_was_computed(fleet: Corral) -> None:
    names = ["Ana", "Ben", "Eva", "Leo", "Mia"]
    for name in names:
        ask(fleet, conversation(name))
    at_once = [ask(fleet, conversation(name) + " And then?") for name in names]
    time.sleep(REPORTS_TAKE_S)
    later = [ask(fleet, conversation(name) + " And later?") for name in names]
    assert min(at_once + later) >= 96, (at_once, later)


def test_strangers_go_to_all(fleet: Corral) -> None:
    def generated() -> dict[str, int]:
        engines = replicas(fleet).items()
        return {name: engine["tokens"]["generated_tokens"] for name, engine in engines}

    before = generated()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda i: ask(fleet, conversation(f"{i} Bob"), 32), range(12)))
    grown = [after - before[name] for name, after in generated().items()]
    assert sum(grown) == 12 * 32
    assert min(grown) >= 32, grown


def test_a_burst_with_one_beginning_computes_it_once_or_twice(fleet: Corral) -> None:
    time.sleep(REPORTS_TAKE_S)  # what strangers had of them may count as still to be done
    before = sum(one["tokens"]["prompt_tokens"] for one in replicas(fleet).values())
    text = conversation("Zoe")
    with ThreadPoolExecutor(4) as pool:
        cached = list(pool.map(lambda i: ask(fleet, text + f" {i}"), range(4)))
    computed = sum(one["tokens"]["prompt_tokens"] for one in replicas(fleet).values()) - before
    assert sum(n > 0 for n in cached) >= 2, (cached, computed)


def test_a_new_ingress_hears_what_replicas_hold(fleet: Corral) -> None:
    names = [f"{name}belle" for name in ("Anna", "Ella", "Isa", "Lu", "Mira")]
    for name in names:
        ask(fleet, conversation(name))
    (victim,) = fleet.pids(INGRESS)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: set(fleet.pids(INGRESS)) - {victim} != set(), 60, "another ingress")
    fleet.wait_ready()
    wait_until(lambda: len(replicas(fleet)) == N_REPLICAS, 60, "it knows all replicas")
    time.sleep(REPORTS_TAKE_S)
    cached = [ask(fleet, conversation(name) + " And now?") for name in names]
    assert min(cached) >= 96, cached


def test_engines_are_not_told_who_comes_and_goes(fleet: Corral) -> None:
    """Or each of them would be, for each of them: Serve's routers write it into their replica's log."""
    logs = fleet.directory / "ray" / "session_latest" / "logs" / "serve"

    def told(of: str) -> dict[str, int]:
        updates = re.compile(r"Got updated replicas for Deployment\(name='engine-tiny'")
        found = logs.glob(f"replica_corral_{of}_*.log")
        return {log.name: len(updates.findall(log.read_text())) for log in found}

    ingresses, engines = told("Ingress"), told("engine-tiny")
    assert len(engines) == N_REPLICAS
    assert max(engines.values()) >= 1  # the first one had nobody to ask
    os.kill(fleet.pids("ray::ServeReplica:corral:engine-tiny")[0], signal.SIGKILL)
    wait_until(lambda: len(told("engine-tiny")) > N_REPLICAS, 60, "another engine")
    wait_until(lambda: len(replicas(fleet)) == N_REPLICAS, 60, "all replicas up")
    assert sum(told("Ingress").values()) >= sum(ingresses.values()) + 2
    assert {name: told("engine-tiny")[name] for name in engines} == engines


def test_several_answers_to_one_prompt(fleet: Corral) -> None:
    body = {"prompt": ["One", "Two", "Three"], "n": 2, "max_tokens": 4, "ignore_eos": True}
    answer = fleet.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 6


def test_other_calls_are_routed(fleet: Corral) -> None:
    answer = fleet.http.post("/v1/embeddings", json={"input": ["One", "Two"]})
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == 2
