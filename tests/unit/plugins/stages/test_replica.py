"""Stages agree on each one's layers by what all of them report."""

from __future__ import annotations

import pytest

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.base.errors import ConfigError
from serve_app.kernels.openvino.parts import ModelShape
from serve_app.plugins.stages.replica import StageReport, StageSpeed, plan_layers
from serve_app.run.sizing import PROCESS_BYTES

SHAPE = ModelShape((10,) * 12, (0,) * 12, 0.0, 30, 30, (1,) * 12)
BY_BYTES = [7, 12]


def report(
    layers: tuple[int, int] | None = None,
    bytes_per_s: float = 1.0,
    sampled: float = 1.0,
    memory: int | None = None,
    node: str = "",
) -> StageReport:
    speed = None if layers is None else StageSpeed(layers, bytes_per_s, 8.0, sampled)
    return StageReport(node, None if memory is None else memory + PROCESS_BYTES, speed)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        pytest.param([report(), report()], BY_BYTES, id="nothing is known"),
        pytest.param([report((0, 8)), report()], BY_BYTES, id="one counts as the other"),
        pytest.param([report((0, 8), 1.0), report((8, 12), 2.0)], [5, 12], id="speeds"),
        pytest.param([report((0, 7)), report((7, 12), 1.01)], [7, 12], id="hardly faster: stays"),
        pytest.param([report((0, 5)), report((5, 12))], BY_BYTES, id="much faster: changes"),
        pytest.param([report((0, 8)), report((0, 6))], BY_BYTES, id="of two divisions"),
        pytest.param([report((0, 8), 1, 0.1), report((8, 12), 1, 0.1)], [6, 12], id="prompts"),
        pytest.param([report(memory=55, node="a"), report(memory=200)], [5, 12], id="memory"),
    ],
)
def test_all_that_is_known_divides_the_layers(
    reports: list[StageReport], expected: list[int]
) -> None:
    assert [part.stop for part in plan_layers(SHAPE, reports, 8, 0)] == expected


def test_stages_on_one_node_share_its_memory() -> None:
    here = report(memory=150 + PROCESS_BYTES, node="a")  # of two processes
    assert [part.stop for part in plan_layers(SHAPE, [here, report(node="b")], 8, 0)] == BY_BYTES
    with pytest.raises(ConfigError, match="memory of 2 stages has no room"):
        plan_layers(SHAPE, [here, here], 8, 0)
