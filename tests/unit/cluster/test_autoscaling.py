"""How many replicas a load needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from serve_app.channel.pressure import PRESSURE, engine_pressure
from serve_app.cluster.autoscaling import by_pressure


@pytest.mark.parametrize(
    ("load", "pressure"),
    [
        pytest.param((0, 0, 0), 0, id="nothing to do"),
        pytest.param((2, 0.4, 0.1), 0.5, id="half of the slots it should have busy"),
        pytest.param((9, 1.0, 0.5), 1.25, id="all slots busy is one replica too few"),
        pytest.param((40, 0.25, 0.2), 4, id="few requests, but long ones"),
        pytest.param((5, 0.4, 0.9), 1, id="few requests that fill the cache"),
        pytest.param((20, 3.2, 0.9), 4, id="many wait"),
    ],
)
def test_pressure_is_that_of_the_scarcest(
    load: tuple[float, float, float], pressure: float
) -> None:
    assert engine_pressure(*load) == pytest.approx(pressure)


def context(metrics: object, target: int = 2) -> Any:
    return SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=target)


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [
        pytest.param({PRESSURE: {"a": 1.5, "b": 0.7}}, 2.2, id="what all replicas fill"),
        pytest.param({PRESSURE: {"a": 0.0}}, 0, id="nothing to do: none"),
        pytest.param({PRESSURE: {}}, 2, id="nobody has reported: no change"),
        pytest.param({}, 2, id="nothing is known: no change"),
        pytest.param(None, 2, id="nothing is there: no change"),
    ],
)
def test_wanted_replicas(metrics: object, wanted: float) -> None:
    found, remembered = by_pressure(context(metrics))
    assert found == pytest.approx(wanted)
    assert remembered == {}


def test_serve_finds_the_policy() -> None:
    policy: Any = {"policy_function": "serve_app.cluster.autoscaling:by_pressure"}
    assert AutoscalingConfig(policy=policy).policy.get_policy().__name__ == "by_pressure"
