"""When a replica ends. All else of it is tested end to end."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.base.errors import EngineFailedError
from serve_app.cluster.replica import EngineReplica, OnDemandReplica
from serve_app.run.replica.loaded_model import LoadedModel


class EndedError(Exception):
    """Instead of the process's end."""


class Broken:
    """A replica whose engine fails whatever is asked of it: what methods of LoadedModel see of it."""

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

    monkeypatch.setattr("serve_app.run.replica.loaded_model.os._exit", end)


Replica: Any = LoadedModel


@pytest.mark.usefixtures("_ends")
def test_a_replica_whose_engine_is_not_healthy_ends_its_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "corral.replica"), pytest.raises(EndedError):
        Replica.check_health(Broken())
    assert "The replica ends, as its engine failed: It hangs." in caplog.text


@pytest.mark.usefixtures("_ends")
async def test_so_does_one_that_cannot_embed() -> None:
    with pytest.raises(EndedError):
        await Replica.embed(Broken(), ((1,),), "", b"key")


@pytest.mark.parametrize("deployment", [EngineReplica, OnDemandReplica])
async def test_a_replica_whose_start_failed_may_leave(deployment: Any) -> None:
    """Serve calls its hook then, too, of an object that has nothing."""
    await deployment.func_or_class.__del__(SimpleNamespace())
