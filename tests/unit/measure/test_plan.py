"""A plan of stages: what nodes with so much memory hold and serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

from serve_app.builtin_model import BUILTIN_MODEL
from serve_app.config.sizing import PROCESS_BYTES
from serve_app.engine.autotune.cost_model import Profile
from serve_app.errors import ConfigError
from serve_app.measure import plan as planning
from serve_app.measure.pipeline import MeasuredLayers, PipelineLoad
from serve_app.measure.plan import planned
from serve_app.openvino.parts import ModelShape, StageNode

MIB = 2**20
SHAPE = ModelShape((10 * MIB,) * 12, (0,) * 12, 0.0, 30 * MIB, 30 * MIB, (100,) * 12, 64)
TIMES = MeasuredLayers(SHAPE, Profile({1: 0.1, 8: 0.15}, {16: 0.2, 512: 4.0}))
BOUNDS = {"ttft_p95_s": 5.0, "itl_p95_ms": 500.0}
LOAD = PipelineLoad(8, 100, 50, 20.0)


_SHORT = ("--think", "1", "--max-tokens", "4", "--slo", "ttft_p95=50ms")


def plan(nodes: int, stages: int, memory_mib: int = 400, network: float = 1.0) -> dict[str, Any]:
    return planned(
        SHAPE,
        TIMES,
        LOAD,
        BOUNDS,
        n_ctx_train=2**17,
        nodes=nodes,
        stages=stages,
        node=StageNode(memory_bytes=memory_mib * MIB),
        network_gbit=network,
    )


def test_chains_multiply_and_longer_ones_hold_more() -> None:
    one, two, chain = plan(1, 1), plan(2, 1), plan(2, 2)
    assert (two["requests at once"], two["chains"]) == (16, 2)
    assert two["tokens of each"] == one["tokens of each"]
    assert two["tokens/s"] == 2 * one["tokens/s"]
    assert two["users"] == 2 * one["users"] > 0
    assert (chain["requests at once"], chain["chains"]) == (16, 1)
    assert chain["layers of each stage"] == [7, 5]
    tokens = [plan(n, n, 200)["tokens of each"] for n in (1, 2)]
    assert tokens[0] < tokens[1], "weights leave more of each node"
    assert 1.5 < chain["tokens/s"] / one["tokens/s"] < 2
    assert chain["one user, tokens/s"] < one["one user, tokens/s"]


def test_a_slow_network_is_felt() -> None:
    slow, fast = (plan(2, 2, network=gbit)["first token, s"] for gbit in (0.0001, 1))
    assert slow > 2 * fast


def test_a_model_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory of 2 stages has no room"):
        plan(2, 2, memory_mib=60)


def test_the_command_prints_a_table_and_writes_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times, figures = tmp_path / "times.json", tmp_path / "plan.json"
    times.write_bytes(msgspec.json.encode(TIMES))
    words = [str(BUILTIN_MODEL), "--times", str(times), "--json", str(figures)]
    planning.main([*words, "--nodes", "1,2", "--network", "1,10", "--memory", "1", *_SHORT])
    plans = json.loads(figures.read_text())
    assert [(each["nodes"], each["Gbit/s"]) for each in plans] == [
        *((1, 1), (1, 10)),
        *((2, 1), (2, 10)),
    ]
    assert plans[0].keys() == plan(1, 1).keys()
    assert capsys.readouterr().out.count("\n") == 2 + len(plans)
    small = str((PROCESS_BYTES + 5 * MIB) / 2**30)
    planning.main([*words, "--nodes", "7", "--memory", small, "--slots", "1", *_SHORT])
    (longest,) = json.loads(figures.read_text())
    assert longest["layers of each stage"] == [1] * 6, "no stage without a layer"
    with pytest.raises(SystemExit, match="has no room"):
        planning.main([*words, "--memory", "0.5"])
    times.write_text("[]")
    with pytest.raises(SystemExit, match=r"times.json has no measured times: Expected"):
        planning.main(words)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--slo", "e2e_p95=1s", "ttft and itl only"),
        ("--slo", "soon", "'soon': expected"),
        ("--memory", "inf", "not a number between"),
        ("--network", "1,0", "not a number between"),
        ("--think", "nan", "not a number between"),
        ("--json", "/nowhere/plan.json", "not a file in a folder"),
    ],
)
def test_an_option_of_no_use_is_refused_before_anything_is_measured(
    option: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        planning.main([str(BUILTIN_MODEL), option, value])
    assert reason in capsys.readouterr().err
