"""How Serve is told to keep the models that are loaded on demand."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serve_app.app import build
from serve_app.config.resolved import Standby
from serve_app.placement import machine
from serve_app.placement.machine import Machine
from tests.unit.placement.machines import topology

# Serve 2.60 wants to look back for longer than replicas take to tell their load. The policy needs the last
# word only.
pytestmark = pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")
HERE = Machine(topology(((i,), 0) for i in range(4)), None, 2**34, 2**34)


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read", lambda: HERE)


def entry(name: str, keep_alive: str | None = "1m", **deployment: Any) -> dict[str, Any]:
    engine = {"n_slots": 1, "n_ctx_slot": 256}
    told = {} if keep_alive is None else {"keep_alive": keep_alive}
    return (
        {"id": name, "source": {"builtin": True}, "engine": engine}
        | told
        | {"deployment": deployment}
    )


def engines(*entries: dict[str, Any], **args: Any) -> dict[str, tuple[str, Any, Any]]:
    """By their names: the class, what it is given, and Serve's options."""
    ingress: Any = build({"models": list(entries)} | args)._bound_deployment
    bound = [one._bound_deployment for one in ingress.init_args[1]]
    return {one.name: (one.func_or_class.__name__, one.init_args[0], one) for one in bound}


def test_models_with_a_process_each_reserve_what_those_take_that_are_loaded() -> None:
    found = engines(entry("a"), entry("b"), entry("c"), entry("always", None), max_loaded_models=1)
    assert [kind for kind, _, _ in found.values()] == ["StandbyReplica"] * 3 + ["EngineReplica"]
    for name in ("engine-a", "engine-b", "engine-c"):
        _, model, served = found[name]
        assert model.standby == Standby(60.0, 1, 2.0, 0.66)
        assert served.num_replicas == 1
        assert served._deployment_config.autoscaling_config is None
        assert served.ray_actor_options["num_cpus"] == 0.66
    _, model, served = found["engine-always"]
    assert model.standby is None
    assert served.ray_actor_options["num_cpus"] == 2


def test_as_many_as_there_are_may_be_loaded_at_once() -> None:
    (one,) = (model.standby for _, model, _ in engines(entry("a"), max_loaded_models=5).values())
    assert one == Standby(60.0, 5, 4.0, 4.0)


def test_reserved_cpus_are_those_of_a_model_that_is_loaded() -> None:
    found = engines(entry("a", ray_actor_options={"num_cpus": 3}), entry("b"))
    assert found["engine-a"][1].standby == Standby(60.0, 1, 3.0, 1.5)
    assert found["engine-b"][1].standby == Standby(60.0, 1, 4.0, 2.0)


@pytest.mark.parametrize("args", [{"standby": False}, {}], ids=str)
def test_without_a_process_serve_scales_them(args: dict[str, Any]) -> None:
    scaled: dict[str, Any] = {} if args else {"autoscaling_config": {"max_replicas": 2}}
    found = engines(entry("a", **scaled), entry("b"), **args)
    assert {kind for kind, _, _ in found.values()} == {"EngineReplica"}
    for _, model, served in found.values():
        assert model.standby is None
        assert served._deployment_config.autoscaling_config.min_replicas == 0


def test_several_replicas_do_not_stand_by() -> None:
    scaled = entry("a", autoscaling_config={"max_replicas": 2})
    with pytest.raises(RayServeException, match="standby: a may have several replicas"):
        engines(scaled, entry("b"), standby=True)
    engines(entry("always", None, autoscaling_config={"max_replicas": 2}), entry("b"), standby=True)


@pytest.mark.parametrize(("standby", "told"), [(True, False), (False, True)])
def test_ingresses_tell_the_policy_what_is_awaited_if_there_is_one(
    standby: bool, told: bool
) -> None:
    ingress: Any = build({"models": [entry("a")], "standby": standby})._bound_deployment
    policy = ingress._deployment_config.autoscaling_config.policy
    assert ("for_ingress" in str(policy)) is told
