"""A deployment whose replicas compute one model in stages, and what does not go with stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serve_app.app import build
from serve_app.base.errors import ConfigError
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import parse
from serve_app.run import resolving
from serve_app.run.placement.machine import Machine
from serve_app.run.resolving import resolve
from serve_app.run.sizing import PROCESS_BYTES
from tests.unit.run.placement.machines import topology

pytestmark = pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")
HERE = Machine(topology(((i,), 0) for i in range(8)), None, 2**34, 2**34)


def entry(stages: int | str = 2, **more: Any) -> dict[str, Any]:
    engine = {"stages": stages, "threads": 1} | more.pop("engine", {})
    return {"id": "m", "source": {"builtin": True}, "engine": engine} | more


def resolved(model: dict[str, Any]) -> ResolvedModel:
    return resolve(parse({"models": [model]}), HERE)[0]


def test_the_replicas_of_a_model_are_one_gang() -> None:
    ingress: Any = build({"models": [entry()]})._bound_deployment
    deployment = ingress.init_args[1][0]._bound_deployment
    gang = deployment._deployment_config.gang_scheduling_config
    assert (gang.gang_size, gang.gang_placement_strategy.value) == (2, "SPREAD")
    scaling = deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 2)
    router = deployment._deployment_config.request_router_config
    assert router.request_router_kwargs == {"gang_size": 2}
    model = deployment.init_args[0]
    assert (model.stages, model.n_replicas, model.options.backend) == (2, 2, "openvino")


def test_each_replica_has_its_part_of_the_weights() -> None:
    whole, part = (resolved(entry(stages, projector=False)) for stages in (1, 3))
    # What the weights leave of its part of the memory is a third of what they leave of all.
    assert part.options.cache_ram_bytes == whole.options.cache_ram_bytes // 3
    assert (whole.stages, part.stages) == (1, 3)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"engine": {"backend": "llama.cpp"}}, "engine.backend: llama.cpp"),
        ({"engine": {"draft": {"own_layers": True}}}, "engine.draft"),
        ({"adapters": [{"id": "a", "source": {"path": "a.gguf"}}]}, "adapters"),
        ({"projector": {"path": "p.gguf"}}, "projector"),
        ({"keep_alive": "5m"}, "keep_alive"),
        ({"serve": {"max_replicas_per_node": 1}}, "serve.max_replicas_per_node"),
        ({"serve": {"num_replicas": 3}}, "serve.num_replicas that is no multiple"),
        ({"serve": {"autoscaling_config": {"max_replicas": 3}}}, "a bound of serve"),
        ({"serve": {"ray_actor_options": {"num_cpus": 0}}}, "num_cpus: 0"),
    ],
)
def test_what_does_not_go_with_stages_is_named(more: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.stages: 2 does not go with .*{named}"):
        parse({"models": [entry(**more)]})


@pytest.mark.parametrize(
    ("nodes", "stages"), [((2**40,), 1), ((PROCESS_BYTES + 5 * 2**20, 2**40), 3)], ids=str
)
def test_auto_is_the_fewest_stages_that_the_smallest_node_has_room_for(
    nodes: Sequence[float], stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in model has 5.5 MiB, and 2 MiB of cache for each engine."""
    monkeypatch.setattr(resolving, "_memory_of_nodes", lambda num_cpus: nodes)
    engine = {"n_slots": 4, "n_ctx_slot": 170}
    model = resolved(entry("auto", projector=None, engine=engine))
    assert model.stages == stages
    assert model.options.backend == ("auto" if stages == 1 else "openvino")
    replicas = {"serve": {"num_replicas": 4}, "engine": engine}
    if stages == 3:
        with pytest.raises(ConfigError, match=r"auto \(3\) does not go with .* no multiple"):
            resolved(entry("auto", **replicas))


def test_whole_gangs_are_added_and_removed() -> None:
    scaling = {"min_replicas": 2, "max_replicas": 6}
    parse({"models": [entry(serve={"autoscaling_config": scaling})]})
    parse({"models": [entry(serve={"num_replicas": 4})]})


@pytest.mark.parametrize("stages", [1, 2, "auto"])
def test_a_model_in_openvinos_exported_format_is_refused(tmp_path: Path, stages: int | str) -> None:
    source = {"source": {"path": str(tmp_path)}}
    with pytest.raises(ConfigError, match="is no GGUF file, and Corral serves no models in Open"):
        resolved(entry(stages, projector=None) | source)
