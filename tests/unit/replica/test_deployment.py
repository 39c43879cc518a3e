"""How a replica finds its threads and its cores, and when it ends. All else of it is tested end to end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from serve_app.app import resolve
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.errors import ConfigError, EngineFailedError
from serve_app.replica.deployment import EngineReplica, settle_in

N_CORES = 4


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four usable cores, and nothing is pinned."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("serve_app.placement.machine.usable_cores", lambda: N_CORES)
    monkeypatch.setattr("serve_app.app.usable_cores", lambda: N_CORES)
    monkeypatch.setattr("serve_app.placement.place._pin", lambda cpus: None)


def model(num_cpus: float | None = None, **engine: Any) -> ResolvedModel:
    sizes = {"n_slots": 4, "n_ctx_slot": 256, **engine}
    entry = {
        "id": "m",
        "source": {"builtin": True},
        "engine": sizes,
        "deployment": {"ray_actor_options": {"num_cpus": num_cpus}},
    }
    return resolve(schema.parse({"models": [entry]}).models[0], share=1)


@pytest.mark.parametrize(
    ("reserved", "configured", "threads"),
    [(0, None, 4), (2, None, 2), (0.5, None, 1), (2.5, None, 2), (9, None, 4), (3, 2, 2)],
)
def test_threads_are_the_least_of_all(
    reserved: float, configured: int | None, threads: int
) -> None:
    assert settle_in(model(threads=configured), reserved)[1] == threads


@pytest.mark.parametrize(
    ("num_cpus", "engine", "expected"),
    [
        (None, {}, 4),
        (None, {"threads": 2}, 2),
        (None, {"threads": 2, "threads_batch": 3}, 3),
        (None, {"threads_batch": 2}, 4),
        (None, {"threads": 9, "allow_oversubscription": True}, 4),
        (8, {"threads": 8}, 8),
    ],
)
def test_a_core_is_reserved_for_every_thread(
    num_cpus: float | None, engine: dict[str, Any], expected: float
) -> None:
    assert (num_cpus or model(num_cpus, **engine).num_cpus) == expected
    assert model(num_cpus, **engine).options.threads_batch == engine.get("threads_batch")


@pytest.mark.parametrize(
    ("num_cpus", "engine", "message"),
    [
        (None, {"threads": 5}, "5 threads on 4 cores, all that this machine may use"),
        (None, {"threads_batch": 5}, "5 threads on 4 cores"),
        (2, {"threads": 3}, "3 threads on 2 cores, which deployment.ray_actor_options.num_cpus"),
        (0.5, {"threads": 2}, "2 threads on 1 core, which"),
    ],
)
def test_too_many_threads_stop_the_start(
    num_cpus: float | None, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"models \(m\): engine.threads: " + message):
        model(num_cpus, **engine)
    assert model(num_cpus, **engine, allow_oversubscription=True).id == "m"


def test_the_node_may_have_fewer_cores_than_ray_believes() -> None:
    with pytest.raises(ConfigError, match="8 threads on 4 cores, all that this replica may use"):
        settle_in(model(8, threads=8), reserved=8)


def test_allowed_oversubscription_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "corral.replica"):
        place, threads = settle_in(model(threads=8, allow_oversubscription=True), reserved=4)
    assert threads == 8
    assert place.report == "not pinned to cores: it has more threads than cores"
    assert "8 threads on 4 cores" in caplog.text


def test_pinning_can_be_switched_off() -> None:
    place, _ = settle_in(model(threads=1, pin_cores=False), reserved=1)
    assert place.report == "not pinned to cores: engine.pin_cores is false"


def test_whole_cores_are_leased() -> None:
    place, _ = settle_in(model(threads=1), reserved=1)
    assert place.cores is not None
    assert len(place.cores) == 1


def test_numa_without_nodes_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "corral.replica"):
        place, _ = settle_in(model(threads=1, numa="distribute"), reserved=1)
    assert "engine.numa has no effect" in caplog.text
    assert place.cores is not None


@pytest.mark.parametrize(("numa", "pinned"), [("isolate", False), ("numactl", True)])
def test_threads_that_llama_cpp_places_are_not_pinned(
    monkeypatch: pytest.MonkeyPatch, numa: str, pinned: bool
) -> None:
    monkeypatch.setattr("serve_app.placement.topology.Topology.nodes", property(lambda _: (0, 1)))
    place, _ = settle_in(model(threads=1, numa=numa), reserved=1)
    assert (place.cores is not None) is pinned


class EndedError(Exception):
    """Instead of the process's end."""


class Broken:
    """A replica whose engine fails whatever is asked of it: what methods of EngineReplica see of it."""

    def __init__(self) -> None:
        self._engine = self

    def check_health(self) -> None:
        raise EngineFailedError("It hangs.")

    def _refuse_strange_tokens(self, vocabulary_key: bytes) -> None:
        pass

    async def _embed(self, texts: object) -> None:
        raise EngineFailedError("It hangs.")


@pytest.fixture
def _ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the process is an EndedError."""

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr("serve_app.replica.deployment.os._exit", end)


SERVED: Any = EngineReplica


@pytest.mark.usefixtures("_ends")
def test_a_replica_whose_engine_is_not_healthy_ends_its_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "corral.replica"), pytest.raises(EndedError):
        SERVED.func_or_class.check_health(Broken())
    assert "The replica ends, as its engine failed: It hangs." in caplog.text


@pytest.mark.usefixtures("_ends")
async def test_so_does_one_that_cannot_embed() -> None:
    with pytest.raises(EndedError):
        await SERVED.func_or_class.embed(Broken(), ((1,),), "", b"key")
