"""How long first tokens and gaps took lately."""

from __future__ import annotations

from serve_app.engine.metrics.trace import BOUNDS, Latencies
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import SteppedBackend, ask, endless, options, request, running, start


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_counts_are_by_upper_bounds_a_tenth_apart() -> None:
    latencies = Latencies(Clock())
    for seconds in (0.0, 0.001, 0.5, 0.5, 10_000):
        latencies.add("itl_s", seconds)
    latencies.add("ttft_s", 2.0)
    found = latencies.recent()
    (half,) = [bound for bound, n in found["itl_s"].items() if n == 2 and bound > 0.001]
    assert 0.5 <= half < 0.55
    assert found["itl_s"] == {0.001: 2, half: 2, BOUNDS[-1]: 1}
    assert found["ttft_s"].keys().isdisjoint(found["itl_s"])


def test_what_is_longer_ago_than_five_minutes_is_forgotten() -> None:
    clock = Clock()
    latencies = Latencies(clock)
    latencies.add("ttft_s", 1.0)
    clock.now += 280
    latencies.add("ttft_s", 3.0)
    assert sum(latencies.recent()["ttft_s"].values()) == 2
    clock.now += 30
    assert sum(latencies.recent()["ttft_s"].values()) == 1
    clock.now += 300  # with nobody adding
    assert latencies.recent() == {"ttft_s": {}, "itl_s": {}}


def test_many_hours_take_no_more_memory() -> None:
    clock = Clock()
    latencies = Latencies(clock)
    for _ in range(1000):
        clock.now += 15
        latencies.add("itl_s", 0.1)
    assert sum(latencies.recent()["itl_s"].values()) == 20


def test_an_engine_counts_first_tokens_and_gaps() -> None:
    with running(FakeBackend(endless, n_slots=2), options(2, speculate=False)) as engine:
        for name, n in (("a", 5), ("b", 1)):
            ask(engine, request(name, "x" * 40, max_tokens=n))
        found = engine.latencies()
    assert sum(found["ttft_s"].values()) == 2
    assert sum(found["itl_s"].values()) == 4


def test_slots_tell_how_much_of_a_prompt_was_in_the_cache() -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, speculate=False)) as engine:
        start(engine, request("a", "x" * 20, max_tokens=1))
        backend.wait_for_batch()
        start(engine, request("b", "x" * 20 + "y" * 5, max_tokens=2))
        while (slot := engine.stats().slots[0]).request_id != "b" or not slot.n_generated:
            backend.step()
        assert (slot.n_cached, slot.n_past, slot.n_generated) == (20, 25, 1)
        backend.resume()
