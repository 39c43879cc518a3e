"""The routing simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.routing import __main__
from loadtests.routing.replica import Asked, Replica, Workload, draw
from loadtests.routing.simulation import PrefixAware, RoundRobin, Simulation, TwoChoices

SMALL = Workload(replicas=8, slots=4, clients=24, requests=300, prefixes=40, routers=2)


@pytest.mark.parametrize("policy", [RoundRobin, TwoChoices, PrefixAware])
def test_every_request_is_answered_once_and_in_full(policy: type[TwoChoices]) -> None:
    simulation = Simulation(SMALL, policy)
    simulation.run()
    assert sorted(one.prompt.key for one in simulation.answered) == list(range(300))
    for one in simulation.answered:
        assert one.n_done == one.n_answer
        assert one.sent_s < one.first_s < one.ended_s
        assert 0 <= one.n_cached < one.prompt.n_tokens


def test_prefixes_are_found_more_often_and_answers_start_sooner() -> None:
    ours, default = (__main__.simulated(SMALL, name) for name in ("Corral", "Serve's default"))
    assert ours["hits"] > 1.5 * default["hits"]
    assert ours["ttft_p95_s"] < default["ttft_p95_s"]
    assert ours["tps"] > default["tps"]


def test_a_replica_alone_takes_the_measured_time() -> None:
    replica, asked = Replica(0, 4, slower=2.0), next(draw(SMALL))
    replica.submit(asked)
    now = 0.0
    ended = list[Asked]()
    while not ended:
        step_s, ended = replica.step(now)
        now += step_s
    n_prompt = asked.prompt.n_tokens
    assert asked.first_s == pytest.approx(2 * 0.002 * n_prompt)
    assert now == pytest.approx(asked.first_s + 2 * 0.01425 * (asked.n_answer - 1))


def test_the_table_has_a_row_for_each_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__main__, "decision_s", lambda: [0.001, 0.002])
    args = "--replicas 4 --slots 2 --clients 8 --requests 40 --prefixes 5 --zipf 1 --json"
    __main__.main([*args.split(), str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    assert out.startswith("Simulated: 4 replicas")
    assert out.count("| 5 | 1.0 |") == 3
    assert len(json.loads((tmp_path / "out.json").read_text())["simulated"]) == 3


def test_decisions_are_timed() -> None:
    assert len(__main__.decision_s(n_replicas=2, n_tokens=64, n_times=3)) == 3
