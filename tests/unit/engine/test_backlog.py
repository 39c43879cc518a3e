from __future__ import annotations

import pytest

from serve_app.engine.backlog import Backlog
from serve_app.engine.cost_model import CostModel, Measurements
from serve_app.engine.sequence import Sequence
from serve_app.types import GenerationRequest, SamplingParams

COSTS = CostModel(Measurements({1: 0.05, 4: 0.08}, {16: 0.16, 100: 0.5}))


def waiting(n_prompt: int, max_tokens: int | None) -> Sequence:
    request = GenerationRequest("a", (1,) * n_prompt, SamplingParams(max_tokens=max_tokens))
    return Sequence(request, lambda delta: None)


def test_prompts_and_answers_take_what_was_measured() -> None:
    backlog = Backlog(COSTS, n_slots=4)
    assert backlog.seconds([]) == 0
    assert backlog.seconds([waiting(101, 50)]) == pytest.approx(100 * 0.005 + 50 * 0.02)
    assert backlog.seconds([waiting(1, None)]) == pytest.approx(128 * 0.02)
    assert backlog.seconds([waiting(1, 5000)]) == pytest.approx(128 * 0.02)


def test_it_learns_how_long_answers_are() -> None:
    backlog = Backlog(COSTS, n_slots=4)
    for _ in range(100):
        done = waiting(1, None)
        done.n_generated = 10
        backlog.ended(done)
    assert backlog.seconds([waiting(1, None)]) == pytest.approx(10 * 0.02, rel=0.01)


def test_places_get_free_one_by_one() -> None:
    backlog = Backlog(COSTS, n_slots=4)
    assert backlog.place_free_s([]) == 1
    assert backlog.place_free_s([waiting(1001, 100)] * 3) == 7
    assert Backlog(CostModel(Measurements()), 4).place_free_s([waiting(9, 9)]) == 1
