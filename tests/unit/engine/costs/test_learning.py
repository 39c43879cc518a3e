"""How well the cost model forecasts machines that a formula describes, with noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from serve_app.cli.measure.benchmark import percentile
from serve_app.engine.costs.cost_model import CostModel, Profile

MEASURED = Profile(
    decode_s={1: 0.02, 4: 0.05, 16: 0.11},
    prefill_s={16: 0.1, 32: 0.11, 64: 0.2, 128: 0.38},
    depth=1000,
    deep_decode_s={1: 0.03, 16: 0.27},
    deep_prefill_s={16: 0.26, 32: 0.43, 128: 1.66},
)
SHALLOW = replace(MEASURED, depth=0, deep_decode_s={}, deep_prefill_s={})


@dataclass(frozen=True)
class Machine:
    """What was measured, but for some factors; its batches differ from that at random."""

    base: float = 1.0
    slope: float = 1.0
    noise: float = 0.05
    hiccups: float = 0.0
    """The part of batches that take three or ten times as long."""
    speed: Callable[[int], float] = lambda step: 1.0

    def errors(self, model: CostModel, n_steps: int, depth: int = 8000) -> list[float]:
        """The forecasts' relative errors while the model learns; a hiccup is nobody's error."""
        rng, truth = random.Random(1), CostModel(MEASURED)
        found = []
        for step in range(n_steps):
            n_past = rng.uniform(0, depth)
            decodes = rng.random() < 0.5
            n = rng.choice((1, 2, 4, 16) if decodes else (16, 24, 32, 64, 128))
            at = (truth.decode_s if decodes else truth.prefill_s)(n, 0)
            more = (truth.decode_s if decodes else truth.prefill_s)(n, n_past) - at
            seconds = (self.base * at + self.slope * more) / self.speed(step)
            seconds *= rng.lognormvariate(0, self.noise)
            forecast = (model.decode_s if decodes else model.prefill_s)(n, n_past)
            found.append(abs(forecast / seconds - 1))
            seconds *= rng.choice((3, 10)) if rng.random() < self.hiccups else 1
            if decodes:
                model.observe_decode(n, n, n_past, seconds)
            else:
                model.observe_prefill(n, n_past, seconds)
        return found


def within(errors: list[float], p50: float = 0.10, p95: float = 0.25) -> bool:
    return percentile(errors, 50) <= p50 and percentile(errors, 95) <= p95


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_it_is_not_confused_by_noise(noise: float) -> None:
    assert within(Machine(noise=noise).errors(CostModel(MEASURED), 200))


@pytest.mark.parametrize("slope", [0.1, 0.3, 3, 10])
@pytest.mark.parametrize("depth", [8_000, 60_000])
def test_it_learns_slopes_that_were_measured_wrongly(slope: float, depth: int) -> None:
    errors = Machine(slope=slope).errors(CostModel(MEASURED), 160, depth)
    assert within(errors[60:])


@pytest.mark.parametrize("base", [0.3, 3])
def test_it_learns_bases_apart_from_slopes(base: float) -> None:
    errors = Machine(base=base).errors(CostModel(MEASURED), 200)
    assert within(errors[60:])


def test_a_slope_of_which_nothing_was_measured() -> None:
    assert within(Machine().errors(CostModel(SHALLOW), 300)[100:])


@pytest.mark.parametrize("factor", [0.25, 0.5, 2])
def test_a_change_of_speed_is_known_within_thirty_steps(factor: float) -> None:
    changing = Machine(speed=lambda step: 1.0 if step < 100 else factor)
    errors = changing.errors(CostModel(MEASURED), 200)
    assert within(errors[:100])
    assert within(errors[120:130])
    assert within(errors[130:])


def test_hiccups_are_not_learnt() -> None:
    errors = Machine(hiccups=0.05).errors(CostModel(MEASURED), 400)
    assert within(errors)


def test_a_hiccup_of_the_measurement_is_no_reason_never_to_try() -> None:
    """Eight rows took longer than sixteen: they are thought to take as long as these until seen."""
    model = CostModel(replace(SHALLOW, decode_s={1: 0.02, 4: 0.05, 8: 0.23, 16: 0.11}))
    assert model.decode_s(8) == pytest.approx(0.11)
    assert model.split(tuple(range(12)), 0) == (12,)
    model.split(tuple(range(8)), 0)
    for _ in range(20):
        model.observe_decode(8, 8, 0, 0.08)
    assert model.decode_s(8) == pytest.approx(0.08, rel=0.05)


def test_batches_that_others_disturb_are_forecast_as_they_are() -> None:
    """Each batch takes four times as long, and then as long as before."""
    model = CostModel(SHALLOW)
    for seconds in (4 * 0.11, 0.11):
        for _ in range(40):
            model.observe_decode(16, 16, 0, seconds)
        assert model.decode_s(16) == pytest.approx(seconds, rel=0.05)


def test_what_was_learned_is_the_next_profile() -> None:
    """A profile of a busy moment: twice too slow, and one size ten times. Two batches of each mend it."""
    busy = {n: 2 * seconds for n, seconds in MEASURED.prefill_s.items()} | {32: 1.1}
    deep = {n: 2 * seconds for n, seconds in MEASURED.deep_prefill_s.items()}
    model = CostModel(replace(MEASURED, prefill_s=busy, deep_prefill_s=deep, share=0.5))
    assert model.prefill_s(32, 0) <= 0.4  # as a larger one
    for _ in range(2):
        for n, seconds in MEASURED.prefill_s.items():
            model.observe_prefill(n, 0, seconds)
        for n, seconds in MEASURED.decode_s.items():
            model.observe_decode(n, n, 0, seconds)
    learned = model.learned_profile()
    assert learned.share == 1.0
    assert learned.prefill_s == pytest.approx(MEASURED.prefill_s, rel=0.1)
    assert learned.decode_s == pytest.approx(MEASURED.decode_s, rel=0.1)
    assert learned.deep_decode_s[16] == pytest.approx(0.27, rel=0.3), "nothing deep was seen"


def test_a_slope_is_kept_as_it_was_learned_if_batches_were_deep() -> None:
    model = CostModel(MEASURED)
    for _ in range(60):
        model.observe_decode(16, 16, 900, 0.11 + 0.9 * 0.04)
    assert model.learned_profile().deep_decode_s[16] == pytest.approx(0.15, rel=0.1)
