"""Stages in simulated time: as fast as the slowest one, and as slow as all together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.engine.autotune.cost_model import Profile
from serve_app.measure.pipeline import MeasuredLayers, Pipeline, PipelineLoad
from serve_app.openvino.parts import ModelShape

SHAPE = ModelShape((10,) * 12, (0,) * 12, 0.0, 30, 30, (1,) * 12, 64)
FULL = PipelineLoad(n_users=8, prompt_tokens=1, answer_tokens=200, n_requests=1)


def served(*stages: float, load: PipelineLoad = FULL, **changes: Any) -> Pipeline:
    """Stages that take so many seconds for any pass, and a second for a prompt of 100 rows and more."""
    options: dict[str, Any] = {"n_slots": 8 // len(stages), "row_bytes": 100, "bytes_per_s": 1e9}

    def stage(seconds: float) -> Any:
        return lambda n_decode, n_prefill: seconds + 0.01 * n_prefill

    pipeline = Pipeline([stage(seconds) for seconds in stages], **(options | changes))
    pipeline.run(load)
    return pipeline


@pytest.mark.parametrize(
    ("stages", "changes", "rate"),
    [
        pytest.param([0.4], {}, 8 / 0.4, id="one"),
        pytest.param([0.2, 0.2], {}, 4 / 0.2, id="two equal ones"),
        pytest.param([0.1, 0.3], {}, 4 / 0.3, id="the slower one bounds"),
        pytest.param([0.2] * 4, {}, 2 / 0.2, id="four"),
        pytest.param([0.2, 0.2], {"n_at_once": 1}, 2 / 0.2, id="on one processor"),
        pytest.param([0.2, 0.2], {"bytes_per_s": 1000}, 8 / (0.4 + 0.4 + 1.6), id="slow network"),
    ],
)
def test_a_pipeline_is_as_fast_as_its_slowest_part(
    stages: list[float], changes: dict[str, Any], rate: float
) -> None:
    assert served(*stages, **changes).tokens_per_s == pytest.approx(rate, rel=0.12)


def test_every_token_of_every_request_is_counted_once() -> None:
    pipeline = served(0.1, 0.1, load=PipelineLoad(5, 40, 7, think_s=3.0, n_requests=4))
    assert len(pipeline.ttft_s) == 5 * 4
    assert len(pipeline.gaps_s) == 5 * 4 * 6
    assert min(pipeline.gaps_s) >= 0.2


def test_a_prompt_beside_answers_keeps_the_stall_budget() -> None:
    load = PipelineLoad(n_users=2, prompt_tokens=64, answer_tokens=50, think_s=1.0)
    assert max(served(0.01, load=load, stall_s=0.25).gaps_s) < 0.26
    assert max(served(0.01, load=load, stall_s=9.0).gaps_s) > 0.6


def test_a_part_takes_its_share_of_what_was_measured() -> None:
    profile = Profile({1: 0.1, 8: 0.2}, {16: 0.4, 64: 1.2})
    seconds = MeasuredLayers(SHAPE, profile).seconds_of(SHAPE, range(6))
    assert seconds(8, 0) == pytest.approx(0.2 * 60 / 150)
    assert seconds(0, 64) == pytest.approx((1.2 - 0.1 * 30 / 150) / 2)
    assert seconds(0, 64) < seconds(8, 64) < seconds(8, 0) + seconds(0, 64), "weights are read once"
    last = MeasuredLayers(SHAPE, profile).seconds_of(SHAPE, range(6, 12))
    assert seconds(8, 0) + last(8, 0) == pytest.approx(0.2)
    others = replace(SHAPE, layer_bytes=(30,) * 4, expert_bytes=(0,) * 4)
    of_others = MeasuredLayers(SHAPE, profile).seconds_of(others, range(4))
    assert of_others(8, 0) == pytest.approx(0.2), "other layers with as many bytes"
