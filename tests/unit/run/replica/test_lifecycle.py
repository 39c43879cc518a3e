"""When a model on demand is loaded within a process that stays, and when it goes."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.errors import ConfigError, EngineUnavailableError
from serve_app.channel.protocol import Address
from serve_app.channel.sender import Channels
from serve_app.config.resolved import ResolvedModel
from serve_app.config.schema import parse
from serve_app.run.replica import loaded_model, on_demand
from serve_app.run.replica.loaded_model import LoadedModel
from serve_app.run.replica.on_demand import ModelLifecycle, OnDemandModel, Residency
from serve_app.run.replica.place import ReplicaPlace
from serve_app.run.resolving import resolve

Process = Callable[[str, int], Residency]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """One with a model of that name, where so many may be loaded."""
    return lambda name, most: Residency(tmp_path / "loaded", name, most)


def test_so_many_have_a_place_and_one_that_leaves_makes_room(process: Process) -> None:
    a, b, c = (process(name, 2) for name in "abc")
    assert a.take(0)
    assert b.take(0)
    assert not c.take(0)
    a.leave()
    a.leave()
    assert c.take(0)
    assert not a.take(0)


def test_nobody_gives_way_while_nobody_waits(process: Process) -> None:
    a, b = process("a", 1), process("b", 1)
    assert a.take(0)
    assert not a.gives_way()
    with b.waiting(1):
        assert a.gives_way()
        assert not b.gives_way()  # it has nothing to give
    assert not a.gives_way()


def test_one_place_for_one_who_waits(process: Process) -> None:
    a, b, c = (process(name, 2) for name in "abc")
    assert a.take(0)
    assert b.take(1)
    with c.waiting(2):
        assert a.gives_way()
        a.leave()
        assert not b.gives_way()
        assert c.take(3)


@pytest.mark.parametrize(
    ("a", "b", "first"),
    [
        ((10, False), (20, False), "a"),  # used longest ago
        ((10, True), (20, True), "a"),  # has worked for longest
        ((10, True), (20, False), "b"),  # is idle
        ((9.5, False), (10.25, False), "a"),
    ],
)
def test_who_gives_way(
    process: Process, a: tuple[float, bool], b: tuple[float, bool], first: str
) -> None:
    loaded = {name: process(name, 2) for name in "ab"}
    for name, (since, is_busy) in zip("ab", (a, b), strict=True):
        assert loaded[name].take(0)
        loaded[name].note(since, is_busy=is_busy)
    with process("c", 2).waiting(30):
        assert [name for name in "ab" if loaded[name].gives_way()] == [first]


def test_who_has_waited_for_longest_is_next(process: Process) -> None:
    a, b, c, d = (process(name, 1) for name in "abcd")
    assert a.take(0)
    with ExitStack() as waiting:
        waiting.enter_context(c.waiting(1))
        with b.waiting(2):
            a.leave()
            assert not d.take(3)  # it comes last
            assert not a.take(3)
            assert not b.take(3)
            assert c.take(3)
            waiting.close()
            c.leave()
            assert b.take(4)


def test_a_place_and_a_wait_go_with_their_process(process: Process) -> None:
    a, b = process("a", 1), process("b", 1)
    pid = os.fork()
    if not pid:
        waits = process("c", 1).waiting(0)
        waits.__enter__()
        os._exit(1 if process("d", 1).take(0) else 0)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    pid = os.fork()
    if not pid:
        os._exit(0 if a.take(0) else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert b.take(0)


def test_names_are_no_paths(process: Process, tmp_path: Path) -> None:
    with process("../x@y", 1).waiting(0):
        assert [one.name for one in (tmp_path / "loaded").iterdir()] == ["waiting-..%2Fx%40y"]


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "loaded").symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        Residency(tmp_path / "loaded", "m", 1)


ADDRESS = Address("node", "path", "127.0.0.1", 1, "secret")


class Engine:
    """A model that is loaded."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.attached: list[Address] = []
        self.is_closed = False

    async def attach(self, address: Address) -> bool:
        self.attached.append(address)
        return not self._node.ingress_is_gone

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.is_closed = True

    def forget(self) -> None:
        assert self.is_closed
        self._node.n_forgotten += 1


class Node:
    """Models that have one place on a node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.loads: list[tuple[str, Engine]] = []
        self.n_left = self.n_forgotten = 0
        self.failure: Exception | None = None
        self.ingress_is_gone = False

    def model(self, name: str = "m", keep_alive_s: float = 3600.0) -> ModelLifecycle:
        async def load() -> Any:
            await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure
            self.loads.append((name, Engine(self)))
            return self.loads[-1][1]

        def left() -> None:
            self.n_left += 1

        residency = Residency(self._folder, name, 1)
        return ModelLifecycle(name, keep_alive_s, residency, load, left)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.loads]

    @property
    def engine(self) -> Engine:
        return self.loads[-1][1]


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(on_demand, "_LOOK_S", 0.0)
    monkeypatch.setattr(on_demand, "_PLACE_S", 0.0)
    yield Node(tmp_path / "loaded")
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def some_turns() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def use(model: ModelLifecycle) -> Any:
    async with model.present() as engine:
        return engine


class Work:
    """A call that a model works on until it may end, or its model is closed."""

    def __init__(self, model: ModelLifecycle) -> None:
        self.may_end = False
        self.has_begun = False
        self.task = asyncio.create_task(self._run(model))

    async def _run(self, model: ModelLifecycle) -> None:
        async with model.present() as engine:
            self.has_begun = True
            closed: Any = engine
            await until(lambda: self.may_end or closed.is_closed)


async def test_the_first_call_loads_the_model_once_for_all(node: Node) -> None:
    model = node.model()
    await model.attach(ADDRESS)
    assert model.loaded is None
    engines = await asyncio.gather(*(use(model) for _ in range(5)))
    await model.wait_until_known()
    assert set(engines) == {node.engine} == {model.loaded}
    assert node.names == ["m"]
    assert node.engine.attached == [ADDRESS]
    await model.attach(ADDRESS)
    assert node.engine.attached == [ADDRESS, ADDRESS]


async def test_an_ingress_that_is_gone_is_told_nothing_the_next_time(node: Node) -> None:
    model, node.ingress_is_gone = node.model(keep_alive_s=0.0), True
    await model.attach(ADDRESS)
    for told in ([ADDRESS], []):
        await use(model)
        await model.wait_until_known()
        assert node.engine.attached == told
        await until(lambda: node.engine.is_closed)


async def test_it_goes_when_nobody_has_asked_for_long(node: Node) -> None:
    model = node.model(keep_alive_s=0.0)
    engine = await use(model)
    await until(lambda: node.n_left)
    assert engine.is_closed
    assert node.n_forgotten == 1
    assert model.loaded is None
    assert await use(model) is not engine


async def test_an_operator_s_unload_waits_for_what_runs(node: Node) -> None:
    model = node.model()
    work = Work(model)
    await until(lambda: work.has_begun)
    model.release()
    await some_turns()
    assert not node.engine.is_closed
    work.may_end = True
    await until(lambda: node.n_left)
    assert node.engine.is_closed


async def test_whoever_asks_after_an_unload_keeps_it(node: Node) -> None:
    model = node.model()
    work = Work(model)
    await until(lambda: work.has_begun)
    model.release()
    engine = await use(model)
    work.may_end = True
    await work.task
    await some_turns()
    assert model.loaded is engine


async def test_an_idle_model_gives_way_at_once(node: Node) -> None:
    a, b = node.model("a"), node.model("b")
    first = await use(a)
    second = await use(b)
    assert first.is_closed
    assert not second.is_closed


async def test_a_busy_model_gives_way_after_its_turn_and_its_calls_get_time_to_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = node.model("a"), node.model("b")
    work = Work(a)
    await until(lambda: work.has_begun)
    waiting = asyncio.create_task(use(b))
    await some_turns()
    assert a.loaded is not None
    with monkeypatch.context() as soon:
        soon.setattr(on_demand, "_TURN_S", 0.0)
        await until(lambda: a.loaded is None)
    again = asyncio.create_task(use(a))  # waits behind b
    await some_turns()
    assert not work.task.done()
    assert node.names == ["a"]
    work.may_end = True
    await waiting
    await again
    assert node.names == ["a", "b", "a"]


async def test_a_call_that_takes_longer_is_cut_off(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_TURN_S", 0.0)
    monkeypatch.setattr(on_demand, "_END_S", 0.0)
    a, b = node.model("a"), node.model("b")
    work = Work(a)
    await until(lambda: work.has_begun)
    await use(b)
    await work.task
    assert node.names == ["a", "b"]
    assert node.n_forgotten == 1


@pytest.mark.parametrize(
    ("failure", "message"),
    [(ConfigError("It is damaged."), "It is damaged"), (OSError("no"), "cannot be loaded")],
)
async def test_a_model_that_cannot_be_loaded_leaves_its_place(
    node: Node, failure: Exception, message: str
) -> None:
    a, b = node.model("a"), node.model("b")
    node.failure = failure
    with pytest.raises(EngineUnavailableError, match=message):
        await use(a)
    assert node.n_left == 1
    node.failure = None
    await use(b)
    await use(a)
    assert node.names == ["b", "a"]


async def test_who_leaves_before_there_is_a_place_loads_nothing(node: Node) -> None:
    a, b = node.model("a"), node.model("b")
    work = Work(a)
    await until(lambda: work.has_begun)
    waiting = asyncio.create_task(use(b))
    await some_turns()
    waiting.cancel()
    await asyncio.wait([waiting])
    await some_turns()
    work.may_end = True
    await work.task
    await some_turns()
    assert node.names == ["a"]
    await use(b)  # another one may still come


async def test_the_end_of_the_process_unloads_it(node: Node) -> None:
    model = node.model()
    await use(model)
    await model.close()
    assert node.engine.is_closed


def _model() -> ResolvedModel:
    app = parse({"models": [{"id": "m", "source": {"builtin": True}, "keep_alive": "1m"}]})
    (model,) = resolve(app)
    return model


async def test_nothing_is_left_of_a_load_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened is closed, and no frame of the error has the model's memory."""
    opened: list[weakref.ref[Channels]] = []
    closed = []

    class WatchedChannels(Channels):
        def __init__(self, node_id: str, replica_id: str) -> None:
            super().__init__(node_id, replica_id)
            opened.append(weakref.ref(self))

        def close(self) -> None:
            super().close()
            closed.append(os.sched_getaffinity(0))

    def fail(*_: object) -> None:
        raise ConfigError("There is no room.")

    monkeypatch.setattr(loaded_model, "Channels", WatchedChannels)
    monkeypatch.setattr("serve_app.engine.Engine.load", fail)
    cpus = os.sched_getaffinity(0)
    place = ReplicaPlace("app", "m", "m-1", "node", tmp_path)
    with pytest.raises(ConfigError, match="There is no room") as caught:
        await LoadedModel.load(replace(_model(), on_demand=None), place)
    gc.collect()
    assert caught.value.__traceback__ is not None
    assert [one() for one in opened] == [None]
    assert len(closed) == 1
    assert os.sched_getaffinity(0) == cpus


async def test_a_model_on_demand_needs_its_folder(tmp_path: Path) -> None:
    (tmp_path / "on-demand").touch()  # no folder
    with pytest.raises(OSError, match="on-demand"):
        OnDemandModel(_model(), ReplicaPlace("app", "m", "m-1", "node", tmp_path))
