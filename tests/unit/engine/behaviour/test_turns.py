"""Engines that share the cores of a machine in turns, over the scripted backend."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.base.sharing import turns
from serve_app.base.sharing.turns import Turns
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.engine_core import EngineCore
from serve_app.engine.core.guest import Guest
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.health import Progress
from serve_app.engine.policy.forecast import Forecast
from serve_app.engine.policy.policy import SlotPolicy
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    WatchedBackend,
    are_accepted,
    endless,
    options,
    request,
    running,
    start,
    until,
)

PASS_S = 0.15


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns" / "0-1"


@pytest.fixture
def other(path: Path) -> Iterator[Turns]:
    """Another engine on the same cores."""
    other = Turns(path)
    yield other
    other.close()


def test_a_start_says_when_two_models_cannot_keep_their_promises_together(
    path: Path, other: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    for others_s, says in ((0.05, False), (0.11, True)):
        other.expect(others_s)
        backend = WatchedBackend(endless, n_slots=2)
        backend.profile = Profile({1: PASS_S, 2: PASS_S}, {16: PASS_S})
        with running(backend, options(max_stall_ms=250, turns=path)):
            assert ("Streams may wait 260 ms, longer than max_stall_ms" in caplog.text) is says


def test_a_request_is_ended_while_background_work_waits_for_the_others(
    path: Path, other: Turns
) -> None:
    backend = WatchedBackend(endless, n_slots=2)
    other.take()
    with running(backend, options(turns=path)) as engine:
        (inbox,) = start(engine, replace(request("a", max_tokens=None), background=True))
        until(lambda: other._table.n_waiting == 1)
        engine.abort("a")
        assert inbox.wait().reason.value == "abort"
        until(lambda: other._table.n_waiting == 0)  # it waits for its turn no more
        assert backend.batches == []


def test_what_is_pinned_is_computed_in_turns(path: Path, other: Turns) -> None:
    backend = FakeBackend(endless, n_slots=3)
    with running(backend, options(2, pinned=((1, 2, 3),), turns=path)):
        assert len(backend.batches) == 1
        assert other._table.entries[1 - other._index].held_s > 0


def test_a_guest_goes_on_in_the_turn(path: Path, other: Turns) -> None:
    """As one that encodes a picture, for background work, and has left the turn to others."""
    backend, sizes = FakeBackend(endless, n_slots=2), options(turns=path)
    queue, forecast = CommandQueue(SlotPolicy(sizes)), Forecast(2, 0, 0, 1)
    one = replace(request("a"), background=True)
    with turns.join(path), ThreadPoolExecutor(1) as pool:
        core = EngineCore(backend, sizes, queue, Progress(), lambda core: [])
        other.take()
        assert are_accepted(queue.submit([EngineSequence(one, lambda delta: None)], forecast))
        interlude = pool.submit(core.interlude)
        until(lambda: core.turns.waited_s > 0)  # it has looked for commands since
        assert not interlude.done()
        other.give()
        interlude.result()
        assert other._table.holder == 1 - other._index
        core.close(healthy=False)


def test_nobody_waits_for_what_is_stored_at_rest_and_at_the_end(path: Path, other: Turns) -> None:
    sizes = options(turns=path)
    queue, ends = CommandQueue(SlotPolicy(sizes)), list[int]()

    class Storing(Guest):
        def close(self, *, healthy: bool) -> None:
            ends.append(other._table.holder)

    with turns.join(path):
        core = EngineCore(
            FakeBackend(endless, n_slots=2), sizes, queue, Progress(), lambda core: [Storing()]
        )
        other.take()
        core.rest()  # beside the other one's turn
        other.give()
        core.turns.take()
        core.close(healthy=True)
        assert ends == [-1]
