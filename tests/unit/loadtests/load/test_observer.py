"""What is read out of a server's statistics."""

from __future__ import annotations

import os
import time
from typing import Any

import httpx
import pytest

from loadtests.load.observer import busy_s, cpu_s, ended, engines_of, sample
from loadtests.load.target import API_KEY, Target


def engine(running: int, **ends: int) -> dict[str, Any]:
    slots = [
        {"state": "pinned", "n_past": 500},
        {"state": "decode", "n_past": 30},
        {"state": "idle", "n_past": 12},
    ]
    return {
        "queue": {"running": running, "waiting": 1, "backlog_s": float(running)},
        "requests": {"ended": ends},
        "cache": {"stored_bytes": 3 * 2**20},
        "slots": slots,
    }


STATS = {
    "models": [
        {
            "id": "a",
            "replicas": [{"engine": engine(1, stop=2)}, {"engine": engine(3, stop=1, abort=4)}],
        },
        {"id": "b", "replicas": []},
    ]
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[httpx.Response]:
    """What the server answers, one after the other."""
    responses: list[httpx.Response] = []

    def get(url: str, headers: dict[str, str], timeout: float) -> httpx.Response:
        assert url == "http://x/v1/stats"
        assert headers == {"Authorization": "Bearer secret"}
        response = responses.pop(0)
        response.request = httpx.Request("GET", url)
        return response

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setenv(API_KEY, "secret")
    return responses


def test_engines_of_a_model_or_of_the_first() -> None:
    assert [e["queue"]["running"] for e in engines_of(STATS, "a")] == [1, 3]
    assert engines_of(STATS, "") == engines_of(STATS, "a")
    assert engines_of(STATS, "b") == []
    assert engines_of({"models": []}, "") == []


def test_ends_add_up_over_replicas() -> None:
    assert ended(engines_of(STATS, "a")) == {"stop": 3, "abort": 4}
    assert ended([]) == {}


def test_a_sample_adds_up_replicas_and_leaves_pinned_slots_out(
    answers: list[httpx.Response],
) -> None:
    answers.append(httpx.Response(200, json=STATS))
    one = sample(Target("http://x"), "a", 1.234)
    assert one is not None
    assert (one.at_s, one.replicas, one.running, one.waiting, one.backlog_s) == (1.23, 2, 4, 2, 3.0)
    assert (one.busy_slots, one.kv_tokens, one.store_mib) == (2, 84, 6.0)
    assert one.rss_mib is None  # somebody else's server


def test_another_kind_of_server_has_no_models_and_one_that_fails_no_sample(
    answers: list[httpx.Response],
) -> None:
    answers += [httpx.Response(404), httpx.Response(500)]
    assert Target("http://x").stats() == {"models": []}
    assert sample(Target("http://x"), "", 0.0) is None


def test_only_replicas_that_were_started_here_can_be_killed() -> None:
    with pytest.raises(LookupError, match="started here"):
        Target("http://x").kill_replica()


def test_cpu_time_is_the_processes_own_and_part_of_the_machines() -> None:
    machine, own = busy_s(), cpu_s([os.getpid()])
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    used = cpu_s([os.getpid()]) - own
    assert 0.15 < used < 0.5
    assert busy_s() - machine >= used - 0.05
    assert cpu_s([2**30]) == 0.0  # no such process
