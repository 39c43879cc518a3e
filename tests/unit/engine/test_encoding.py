"""How long encoding takes between steps."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.engine import GenerationRequest, SamplingParams
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.metrics.stats import Counts
from serve_app.engine.pictures.encoding import Encoding
from serve_app.engine.pictures.tiles import expanded
from serve_app.llama.vision.tiles import Pause
from serve_app.types import MEDIUM, Picture
from tests.unit.engine.behaviour.test_pictures import N_SEEN, ScriptedProjector

PICTURE = Picture.of(b"abc", 1, 1)
N_BATCH = 64


def test_a_piece_takes_its_time_from_the_budget_of_the_step_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    budget = StepBudget(1.0, lambda: now)
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
    request, tiles = expanded(request, projector, N_BATCH)
    sequence = Sequence(request, lambda delta: None, None, tiles)
    encoding = Encoding(projector, budget, 10**6, Counts(), lambda: None)
    assert encoding.step(lambda: [sequence], 0.0, idle=True) is None
    assert seen == [pytest.approx(0.02)]
    assert budget.left_s == pytest.approx(0.98)
    assert encoding.step(lambda: [sequence], 1.0, idle=True) is None  # there is nothing more
    assert seen == [pytest.approx(0.02)]
    encoding._preparing.shutdown()
