"""How Serve is told to keep the models that are loaded on demand."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.app import build
from serve_app.base.errors import ConfigError
from serve_app.config.resolved import OnDemandSettings
from serve_app.config.schema import parse, with_models
from serve_app.run.placement import machine
from serve_app.run.placement.machine import Machine
from serve_app.run.resolving import resolve
from tests.unit.run.placement.machines import topology

# Serve 2.60 wants to look back for longer than replicas take to tell their load. The policy needs the last
# word only.
pytestmark = pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")
HERE = Machine(topology(((i,), 0) for i in range(4)), None, 2**34, 2**34)


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_machine", lambda: HERE)


def entry(name: str, keep_alive: str | None = "1m", **deployment: Any) -> dict[str, Any]:
    engine = {"n_slots": 1, "n_ctx_slot": 256}
    told = {} if keep_alive is None else {"keep_alive": keep_alive}
    return (
        {"id": name, "source": {"builtin": True}, "engine": engine} | told | {"serve": deployment}
    )


def engines(*entries: dict[str, Any], **args: Any) -> dict[str, tuple[str, Any, Any]]:
    """By their names: the class, what it is given, and Serve's options."""
    ingress: Any = build({"models": list(entries)} | args)._bound_deployment
    bound = [one._bound_deployment for one in ingress.init_args[1]]
    return {one.name: (one.func_or_class.__name__, one.init_args[0], one) for one in bound}


def test_models_with_a_process_each_reserve_what_those_take_that_are_loaded() -> None:
    found = engines(entry("a"), entry("b"), entry("c"), entry("always", None), max_loaded_models=1)
    assert [kind for kind, _, _ in found.values()] == ["OnDemandReplica"] * 3 + ["EngineReplica"]
    for name in ("engine-a", "engine-b", "engine-c"):
        _, model, served = found[name]
        assert model.on_demand == OnDemandSettings(60.0, 2.0, 1, False, 1, 0.66)
        scaling = served._deployment_config.autoscaling_config
        assert (scaling.min_replicas, scaling.max_replicas) == (1, 1)
        assert served.ray_actor_options["num_cpus"] == 0.66
    _, model, served = found["engine-always"]
    assert model.on_demand is None
    assert served.ray_actor_options["num_cpus"] == 2


def test_models_that_come_later_have_places_from_the_start() -> None:
    app = parse({"models": [entry("always", None)], "manage_models": True})
    (always,) = resolve(app)
    assert always.num_cpus == 2
    for earlier in ([], [entry("earlier")]):
        added = with_models(app, [*earlier, entry("later")])
        (later,) = resolve(added, n_resolved=len(added.models) - 1)
        assert (later.id, later.num_cpus) == ("later", 2)
        assert later.on_demand is not None
        assert later.on_demand.max_loaded == 1
    with pytest.raises(ConfigError, match="same name"):
        with_models(app, [entry("a"), entry("b") | {"aliases": ["a"]}])


def test_as_many_as_there_are_may_be_loaded_at_once() -> None:
    (one,) = (model.on_demand for _, model, _ in engines(entry("a"), max_loaded_models=5).values())
    assert one == OnDemandSettings(60.0, 4.0, 1, False, 5, 4.0)


def test_reserved_cpus_are_those_of_a_model_that_is_loaded() -> None:
    found = engines(entry("a", ray_actor_options={"num_cpus": 3}), entry("b"))
    assert found["engine-a"][1].on_demand == OnDemandSettings(60.0, 3.0, 1, False, 1, 1.5)
    assert found["engine-b"][1].on_demand == OnDemandSettings(60.0, 4.0, 1, False, 1, 2.0)


def test_a_model_may_have_several_replicas_one_on_each_node() -> None:
    found = engines(entry("a", autoscaling_config={"max_replicas": 2}), entry("b"))
    _, model, served = found["engine-a"]
    assert model.on_demand == OnDemandSettings(60.0, 4.0, 1, True, 1, 2.0)
    scaling = served._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 2)
    assert served._replica_config.max_replicas_per_node == 1
    assert found["engine-b"][1].on_demand == OnDemandSettings(60.0, 4.0, 1, False, 1, 2.0)


def test_replicas_on_the_nodes_of_a_machine_are_loaded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Machine(topology(((i,), i // 2) for i in range(4)), None, 2**34, 2**34)
    monkeypatch.setattr(machine, "read_machine", lambda: here)
    _, model, served = engines(entry("a"), entry("b"))["engine-a"]
    assert model.n_replicas == 2
    assert model.on_demand == OnDemandSettings(60.0, 2.0, 2, True, 2, 1.0)
    assert served._replica_config.max_replicas_per_node == 2
