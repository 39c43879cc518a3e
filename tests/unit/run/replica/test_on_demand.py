"""The deployment of a model whose process stays: what it answers while the model is loaded, or is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.base.errors import ConfigError, EngineUnavailableError
from serve_app.base.values.replicas import Asleep, ReplicaRecords
from serve_app.channel.protocol import Address
from serve_app.config.resolved import OnDemandSettings
from serve_app.run.replica import on_demand
from serve_app.run.replica.place import ReplicaPlace

ADDRESS = Address("node", "path", "127.0.0.1", 1, "secret")
Replica: Any = on_demand.OnDemandModel
CALLS: dict[str, tuple[Any, ...]] = {
    "generate": (SimpleNamespace(id="r"), b"key", ADDRESS, 1),
    "embed": (((1, 2),), "client", b"key", True),
    "media_tokens": ([],),
    "load_adapter": ("adapter",),
}
"""Calls that want the model."""


class Engine:
    """A LoadedModel that repeats what it is asked."""

    def __init__(self) -> None:
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        async def answer(*arguments: Any) -> tuple[Any, ...]:
            return name, *arguments

        return answer

    async def attach(self, _: Address) -> bool:
        return True

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
async def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    async def loaded(model: Any, _: object) -> Engine:
        if model.id == "damaged":
            raise ConfigError("It is damaged.")
        return Engine()

    monkeypatch.setattr("serve_app.run.replica.loaded_model.LoadedModel.load", loaded)
    monkeypatch.setattr(on_demand, "_clean_up", lambda: None)

    async def start(name: str = "m") -> Any:
        return Replica(
            SimpleNamespace(id=name, on_demand=OnDemandSettings(3600.0, 2.0, 1, has_peers=False)),
            ReplicaPlace("app", "engines", "replica", "node", tmp_path / "loaded"),
        )

    yield start
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_wants_the_model_loads_it(replica: Any, name: str) -> None:
    one = await replica()
    assert await one.stats() == Asleep("replica")
    assert await getattr(one, name)(*CALLS[name]) == (name, *CALLS[name])
    assert await one.stats() == ("stats",)
    assert await one.explain("r") == ("explain", "r")
    slot = "replica", "save", 0, "file"
    assert await one.act_on_slot(*slot) == ("act_on_slot", *slot)


@pytest.mark.parametrize("name", [*CALLS, "is_there"])
async def test_why_it_cannot_be_loaded_is_returned(replica: Any, name: str) -> None:
    one = await replica("damaged")
    error = await getattr(one, name)(*CALLS.get(name, ()))
    assert isinstance(error, EngineUnavailableError)
    assert error.status == 503
    assert error.message.startswith("The model cannot be loaded: ")


async def test_looks_load_nothing(replica: Any) -> None:
    one = await replica()
    await one.attach(ADDRESS)
    await one.release()
    one.check_health()
    assert await one.unload_adapter("a", "1")
    assert await one.explain("r") == ReplicaRecords("replica", ())
    assert await one.act_on_slot("replica", "save", 0, "f") is None
    assert await one.stats() == Asleep("replica")


async def test_an_operator_loads_it_and_the_end_of_the_replica_unloads_it(replica: Any) -> None:
    one = await replica()
    assert await one.is_there() is None
    engine = one.lifecycle.loaded
    await one.leave()
    assert engine.is_closed
