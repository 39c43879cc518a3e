"""How layers are divided among stages: by the bytes that passes read, by speed and by memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.base.errors import ConfigError
from serve_app.kernels.openvino.parts import ModelShape, StageNode, divide, fewest_stages

SHAPE = ModelShape((10,) * 12, (0,) * 12, 0.0, 30, 30, (1,) * 12)
EXPERTS = replace(SHAPE, layer_bytes=(2,) * 12, expert_bytes=(80,) * 12, chosen_experts=1 / 8)


def ends(shape: ModelShape, *nodes: StageNode, **conditions: Any) -> list[int]:
    parts = divide(shape, nodes, **conditions)
    assert [i for part in parts for i in part] == list(range(12)), "each layer once, and in order"
    return [part.stop for part in parts]


EQUAL = StageNode()


@pytest.mark.parametrize(
    ("nodes", "conditions", "expected"),
    [
        pytest.param([EQUAL], {}, [12], id="one has everything"),
        pytest.param([EQUAL] * 2, {}, [7, 12], id="the output counts as three layers"),
        pytest.param(
            [EQUAL] * 2, {"read": SHAPE.read_bytes(1, 0.0)}, [6, 12], id="prompts need no output"
        ),
        pytest.param([EQUAL] * 3, {}, [5, 10, 12], id="three"),
        pytest.param([StageNode(3), EQUAL], {}, [11, 12], id="a fast node first"),
        pytest.param([EQUAL, StageNode(2)], {}, [5, 12], id="a fast node last"),
        pytest.param([StageNode(1, 51), EQUAL], {}, [5, 12], id="a small node"),
        pytest.param([StageNode(1, 120), EQUAL], {"n_tokens": 10}, [6, 12], id="with its cache"),
    ],
)
def test_the_slowest_stage_takes_as_little_time_as_possible(
    nodes: list[StageNode], conditions: dict[str, Any], expected: list[int]
) -> None:
    assert ends(SHAPE, *nodes, **conditions) == expected


def test_many_rows_read_more_experts_and_the_output_weighs_less() -> None:
    assert EXPERTS.read_bytes(1)[0] == pytest.approx(2 + 80 / 8)
    assert EXPERTS.read_bytes(16)[0] == pytest.approx(2 + 80 * (1 - (7 / 8) ** 16))
    assert ends(EXPERTS, EQUAL, EQUAL, read=EXPERTS.read_bytes(1)) == [7, 12]
    assert ends(EXPERTS, EQUAL, EQUAL, read=EXPERTS.read_bytes(64)) == [6, 12]


def test_weights_and_cache_of_a_part_are_counted() -> None:
    assert SHAPE.memory_bytes(range(4), 5) == 4 * 10 + 4 * 5
    assert SHAPE.memory_bytes(range(10, 12), 0) == 2 * 10 + 30
    assert EXPERTS.weight_bytes(range(12)) == 12 * 82 + 60


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([EQUAL] * 13, "12 layers, which are too few for 13 stages"),
        ([StageNode(memory_bytes=49)] * 3, "memory of 3 stages has no room"),
    ],
)
def test_a_division_that_is_not_possible_is_refused(nodes: list[StageNode], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        divide(SHAPE, nodes)


@pytest.mark.parametrize(
    ("memory", "n_tokens", "expected"),
    [
        (180, 0, 1),
        (179, 0, 2),
        (80, 0, 2),
        (79, 0, 3),
        (204, 2, 1),
        (203, 2, 2),
        (119, 2, 2),
        (40, 0, 4),
    ],
)
def test_the_fewest_stages_hold_weights_and_the_caches_of_all_engines(
    memory: int, n_tokens: int, expected: int
) -> None:
    assert fewest_stages(SHAPE, StageNode(memory_bytes=memory), n_tokens) == expected


def test_a_layer_that_no_node_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory of 12 stages has no room"):
        fewest_stages(SHAPE, StageNode(memory_bytes=39), 0)
