"""Stages in simulated time: as fast as the slowest one, and as slow as all together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.engine.autotune.cost_model import Profile
from serve_app.measure.pipeline import (
    MeasuredLayers,
    PassSeconds,
    PipelineLoad,
    ServedLoad,
    simulated,
)
from serve_app.openvino.parts import ModelShape

SHAPE = ModelShape((10,) * 12, (0,) * 12, 0.0, 30, 30, (1,) * 12, 64)
FULL = PipelineLoad(n_slots=0, prompt_tokens=1, answer_tokens=200, n_requests=1)


def served(
    *stages: float, load: PipelineLoad = FULL, n_users: int = 8, bytes_per_s: float = 1e9
) -> ServedLoad:
    """Stages that take so many seconds for any pass, and 10 ms more for each row of a prompt. Their engines
    have 8 slots together."""

    def stage(seconds: float) -> PassSeconds:
        return lambda n_decode, n_prefill: seconds + 0.01 * n_prefill

    load = replace(load, n_slots=8 // len(stages))
    seconds = [stage(each) for each in stages]
    return simulated(seconds, load, n_users, row_bytes=100, bytes_per_s=bytes_per_s)


@pytest.mark.parametrize(
    ("stages", "bytes_per_s", "rate"),
    [
        pytest.param([0.4], 1e9, 8 / 0.4, id="one"),
        pytest.param([0.2, 0.2], 1e9, 4 / 0.2, id="two equal ones"),
        pytest.param([0.1, 0.3], 1e9, 4 / 0.3, id="the slower one bounds"),
        pytest.param([0.2] * 4, 1e9, 2 / 0.2, id="four"),
        pytest.param([0.2, 0.2], 1000, 8 / (0.4 + 0.4 + 1.6), id="slow network"),
    ],
)
def test_a_pipeline_is_as_fast_as_its_slowest_part(
    stages: list[float], bytes_per_s: float, rate: float
) -> None:
    assert served(*stages, bytes_per_s=bytes_per_s).tokens_per_s == pytest.approx(rate, rel=0.12)


def test_every_token_of_every_request_is_counted_once() -> None:
    pipeline = served(0.1, 0.1, load=PipelineLoad(0, 40, 7, think_s=3.0, n_requests=4), n_users=5)
    assert len(pipeline.ttft_s) == 5 * 4
    assert len(pipeline.gaps_s) == 5 * 4 * 6
    assert min(pipeline.gaps_s) >= 0.2


def test_a_prompt_beside_answers_keeps_the_stall_budget() -> None:
    load = PipelineLoad(0, prompt_tokens=64, answer_tokens=50, think_s=1.0)
    assert max(served(0.01, load=load, n_users=2).gaps_s) < 0.26
    assert max(served(0.01, load=replace(load, stall_s=9.0), n_users=2).gaps_s) > 0.6


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
