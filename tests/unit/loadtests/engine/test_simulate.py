"""The simulation: who is served when, on the scripted backend, and the figures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest

from loadtests.engine.simulate import parse_args, summary, table
from loadtests.engine.simulation import Answer, Requests, Scenario, Simulation, make_requests
from serve_app.engine import Engine, QueueFullError, Usage
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import endless

SCENARIO = Scenario(
    clients=5,
    slots=2,
    requests=3,
    shared_tokens=40,
    prompt_tokens=4,
    min_tokens=2,
    max_tokens=9,
    continuous=True,
    threads=1,
)
LETTERS = list(b"abcdefghijklmnopqrstuvwxyz")


def simulate(
    scenario: Scenario, clients: Sequence[Requests] | None = None
) -> tuple[list[Answer], FakeBackend]:
    backend = FakeBackend(endless, n_slots=scenario.slots)
    engine = Engine(lambda: backend, scenario.options())
    try:
        simulation = Simulation(engine, clients or make_requests(scenario, LETTERS))
        return asyncio.run(simulation.run(continuous=scenario.continuous)), backend
    finally:
        engine.close()


def number(answer: Answer) -> int:
    """Which of its client's requests it answers."""
    return int(answer.request_id.rpartition("-")[2])


def test_requests_have_what_the_scenario_says() -> None:
    clients = make_requests(SCENARIO, LETTERS)
    requests = [request for client in clients for request in client]
    assert [len(client) for client in clients] == [3] * 5
    assert len({request.id for request in requests}) == 15
    assert {request.prompt[:40] for request in requests} == {requests[0].prompt[:40]}
    assert len({request.prompt[40:] for request in requests}) == 15
    assert {len(request.prompt) for request in requests} == {44}
    lengths = {request.sampling.max_tokens for request in requests}
    assert lengths <= set(range(2, 10))
    assert len(lengths) > 1


def test_only_the_shared_part_differs_between_scenarios() -> None:
    plain = make_requests(replace(SCENARIO, shared_tokens=0), LETTERS)
    shared = make_requests(SCENARIO, LETTERS)
    for a, b in zip(chain.from_iterable(plain), chain.from_iterable(shared), strict=True):
        assert (a.prompt, a.sampling) == (b.prompt[40:], b.sampling)


@pytest.mark.parametrize("continuous", [True, False])
def test_every_request_is_answered_once_and_in_its_clients_order(continuous: bool) -> None:
    scenario = replace(SCENARIO, continuous=continuous)
    answers, _ = simulate(scenario)
    requests = {r.id: r for client in make_requests(scenario, LETTERS) for r in client}
    assert sorted(answer.request_id for answer in answers) == sorted(requests)
    for answer in answers:
        n = requests[answer.request_id].sampling.max_tokens
        assert answer.usage.completion_tokens == len(answer.arrivals_s) == n
        assert answer.ttft_s > 0
    for client in range(scenario.clients):
        own = [a for a in answers if a.request_id.startswith(f"client-{client}-")]
        assert [number(answer) for answer in own] == [0, 1, 2]
        for earlier, later in pairwise(own):
            assert later.sent_s >= earlier.arrivals_s[-1]


def test_without_continuous_batching_a_batch_starts_when_the_last_one_has_ended() -> None:
    answers, _ = simulate(replace(SCENARIO, continuous=False))
    batches = [answers[i : i + 2] for i in range(0, len(answers), 2)]
    assert [len(batch) for batch in batches] == [2] * 7 + [1]
    for batch, following in pairwise(batches):
        ended = max(answer.arrivals_s[-1] for answer in batch)
        assert min(answer.arrivals_s[0] for answer in following) > ended
    assert {number(answer) for batch in batches[:2] for answer in batch} == {0}


def steps_of(continuous: bool) -> int:
    """Batches for two short answers beside a long one, in two slots."""
    scenario = replace(
        SCENARIO, clients=3, requests=1, shared_tokens=0, max_tokens=30, continuous=continuous
    )
    clients = make_requests(scenario, LETTERS)
    lengths = [30, 10, 10]
    requests = [
        [replace(only, sampling=replace(only.sampling, max_tokens=n))]
        for (only,), n in zip(clients, lengths, strict=True)
    ]
    return len(simulate(scenario, requests)[1].batches)


def test_continuous_batching_fills_the_slot_that_a_short_answer_leaves() -> None:
    assert steps_of(continuous=True) < 36
    assert steps_of(continuous=False) >= 40


def test_a_shared_prompt_is_cached() -> None:
    shared, _ = simulate(SCENARIO)
    assert sorted(answer.usage.cached_tokens for answer in shared)[0] == 0
    assert sum(answer.usage.cached_tokens >= 40 for answer in shared) == len(shared) - 1
    plain, _ = simulate(replace(SCENARIO, shared_tokens=0))
    assert summary(SCENARIO, plain)["cached_tokens"] < 15 * 4


def test_a_refusal_ends_the_simulation() -> None:
    options = replace(SCENARIO.options(), max_waiting=0)
    engine = Engine(lambda: FakeBackend(endless, n_slots=2), options)
    try:
        simulation = Simulation(engine, make_requests(SCENARIO, LETTERS))
        with pytest.raises(QueueFullError):
            asyncio.run(simulation.run(continuous=True))
    finally:
        engine.close()


def answer(sent_s: float, *arrivals_s: float, cached: int) -> Answer:
    return Answer("a", Usage(100, len(arrivals_s), cached), sent_s, arrivals_s)


def test_summary() -> None:
    answers = [answer(0.0, 1.0, 1.5, 2.5, cached=0), answer(2.0, 3.0, 4.0, cached=50)]
    result = summary(SCENARIO, answers)
    assert (result["prompt_tokens"], result["cached_tokens"]) == (200, 50)
    assert (result["total_s"], result["cache_hits"]) == (4.0, 0.25)
    assert (result["prompt_tps"], result["computed_prompt_tps"]) == (50.0, 37.5)
    assert result["generated_tps"] == 1.25
    assert (result["ttft_p50_s"], result["itl_p50_ms"], result["e2e_p50_s"]) == (1.0, 1000, 2.25)


def test_one_token_each_has_no_itl() -> None:
    assert summary(SCENARIO, [answer(0.0, 1.0, cached=0)])["itl_p99_ms"] is None


def test_table_has_a_row_for_each_scenario() -> None:
    facts = {"cpu": "A CPU", "cores": 2, "model": "m.gguf", "model_mb": 3, "threads": 1}
    facts |= {"llama_cpp_python": "1.2.3"}
    results = [summary(SCENARIO, [answer(0.0, 1.0, cached=25)])]
    results += [summary(replace(SCENARIO, continuous=False), [answer(0.0, 1.0, 2.0, cached=0)])]
    lines = table(facts, results).splitlines()
    assert lines[0].startswith("A CPU, 2 cores, m.gguf")
    assert lines[4].startswith("| 5 | 2 | 40 | on | 1 | 100 | 25% | 100.0 | 75.0 | 1.0 | 1.00 ")
    assert lines[5].startswith("| 5 | 2 | 40 | off | 1 | 100 | 0% | 50.0 | 50.0 | 1.0 |")
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_arguments_make_every_combination() -> None:
    lists = ["--shared", "0,64", "--continuous", "on,off", "--json", "out"]
    model, scenarios, json_file = parse_args(["--model", "m.gguf", *lists])
    assert (model, json_file) == (Path("m.gguf"), Path("out"))
    assert [(s.shared_tokens, s.continuous) for s in scenarios] == [
        (0, True),
        (0, False),
        (64, True),
        (64, False),
    ]
    assert scenarios[3].options().n_ctx_slot > 64 + 32 + 64


@pytest.mark.parametrize(
    "bad", [["--continuous", "maybe"], ["--shared", "-1"], ["--min-tokens", "65"]], ids=repr
)
def test_arguments_are_checked(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--model", "m.gguf", *bad])
    assert bad[0] in capsys.readouterr().err
