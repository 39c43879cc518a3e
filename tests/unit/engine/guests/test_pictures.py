"""How long encoding takes between steps."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.values.media import MEDIUM, Picture
from serve_app.engine import GenerationRequest, SamplingParams
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.engine.guests.embedding import EmbeddingQueue
from serve_app.engine.guests.pictures import Encoding, NodeTimes, expand_media
from serve_app.engine.health import Progress
from serve_app.engine.policy.policy import SlotPolicy
from serve_app.kernels.llama.vision.positions import Pause, Tile
from tests.doubles.backend import FakeBackend
from tests.unit.engine.behaviour.test_pictures import N_SEEN, ScriptedProjector
from tests.unit.engine.harness import endless, options, steps

PICTURE = Picture.of(b"abc", 1, 1)
N_BATCH = 64


def test_a_piece_takes_its_time_from_the_budget_of_the_step_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    budget = StepBudget(1000, lambda: now)
    monkeypatch.setattr(time, "monotonic", lambda: now)

    class Projector(ScriptedProjector):
        """Looks twice in a tile, which takes 0.02 s then."""

        def encode(
            self, prepared: bytes, tile: int, pause: Pause | None = None
        ) -> NDArray[np.float32] | None:
            nonlocal now
            assert pause is not None
            for _ in range(2):
                now += 0.01
                assert pause()
            seen.append(budget.elapsed_s)
            return np.zeros((N_SEEN, 4), np.float32)

    projector, seen = Projector(), list[float]()
    request = GenerationRequest("p", (1, MEDIUM, 2), SamplingParams(), media=(PICTURE,))
    prompt, tiles = expand_media(request.prompt, iter(request.media), projector, N_BATCH)
    sequence = Sequence(replace(request, prompt=prompt), lambda delta: None, None, tiles)
    policy = SlotPolicy(options())
    view = steps(budget, policy)
    view.running = [sequence]
    backend = FakeBackend(endless, n_slots=1)
    texts = EmbeddingQueue(backend, CostModel(Profile()), Progress(), policy, view)
    encoding = Encoding(projector, 10**6, texts, view)
    encoding.after_step(0.0, idle=True)
    assert seen == [pytest.approx(0.02)]
    assert budget.left_s == pytest.approx(0.98)
    assert sequence.spent_s == pytest.approx(0.02)
    encoding.after_step(1.0, idle=True)  # there is nothing more
    assert seen == [pytest.approx(0.02)]
    encoding.close(healthy=True)


def encoded(times: NodeTimes, tile: Tile, *seconds: float) -> list[float]:
    """What was forecast before each look of a tile that took so long."""
    times.begin(tile)
    found = []
    for one in seconds:
        found.append(times.next_s)
        times.observe(one)
    return found


def test_a_new_shape_is_as_slow_as_it_has_been_at_most() -> None:
    assert encoded(NodeTimes(), Tile(64), 0.1, 0.3, 0.2, 0.1) == [0.0, 0.1, 0.3, 0.3]


def test_the_next_of_a_shape_is_like_the_last_ones_node_by_node() -> None:
    times = NodeTimes()
    encoded(times, Tile(64), 0.1, 0.3, 0.2)
    assert encoded(times, Tile(64), 0.1, 0.1, 0.2) == pytest.approx([0.1, 0.3, 0.2])
    assert encoded(times, Tile(64), 0.1, 0.1, 0.2) == pytest.approx([0.1, 0.2, 0.2])
    assert encoded(times, Tile(9), 0.5) == [0.0]
    assert encoded(times, Tile(64), 0.1, 0.1, 0.2) == pytest.approx([0.1, 0.15, 0.2])


def test_one_slow_moment_is_forgotten() -> None:
    times = NodeTimes()
    encoded(times, Tile(64), 0.1, 9.0)
    for _ in range(10):
        encoded(times, Tile(64), 0.1, 0.1)
    assert encoded(times, Tile(64), 0.1, 0.1) == pytest.approx([0.1, 0.1], abs=0.01)


def test_it_remembers_no_more_than_some_shapes() -> None:
    times = NodeTimes()
    for n_tokens in range(1, 66):
        encoded(times, Tile(n_tokens), 0.1)
    assert encoded(times, Tile(1), 0.1) == [0.0]
