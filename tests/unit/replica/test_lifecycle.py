"""When a model on demand is loaded within a process that stays, and when it goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from serve_app.channel.address import Address
from serve_app.errors import ConfigError, EngineUnavailableError
from serve_app.placement.residency import Residency
from serve_app.replica import lifecycle
from serve_app.replica.lifecycle import ModelLifecycle

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

    def model(self, name: str = "m", keep_alive_s: float = 3600.0) -> ModelLifecycle[Engine]:
        async def load() -> Engine:
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
    monkeypatch.setattr(lifecycle, "_LOOK_S", 0.0)
    monkeypatch.setattr(lifecycle, "_PLACE_S", 0.0)
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


async def use(model: ModelLifecycle[Engine]) -> Engine:
    async with model.present() as engine:
        return engine


class Work:
    """A call that a model works on until it may end, or its model is closed."""

    def __init__(self, model: ModelLifecycle[Engine]) -> None:
        self.may_end = False
        self.has_begun = False
        self.task = asyncio.create_task(self._run(model))

    async def _run(self, model: ModelLifecycle[Engine]) -> None:
        async with model.present() as engine:
            self.has_begun = True
            await until(lambda: self.may_end or engine.is_closed)


async def test_the_first_call_loads_the_model_once_for_all(node: Node) -> None:
    model = node.model()
    await model.attach(ADDRESS)
    assert model.loaded is None
    engines = await asyncio.gather(*(use(model) for _ in range(5)))
    await model.told()
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
        await model.told()
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
        soon.setattr(lifecycle, "_TURN_S", 0.0)
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
    monkeypatch.setattr(lifecycle, "_TURN_S", 0.0)
    monkeypatch.setattr(lifecycle, "_END_S", 0.0)
    a, b = node.model("a"), node.model("b")
    work = Work(a)
    await until(lambda: work.has_begun)
    await use(b)
    await work.task
    assert node.names == ["a", "b"]
    assert node.n_forgotten == 1


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(ConfigError("It is damaged."), ConfigError), (OSError("no"), EngineUnavailableError)],
)
async def test_a_model_that_cannot_be_loaded_leaves_its_place(
    node: Node, failure: Exception, expected: type[Exception]
) -> None:
    a, b = node.model("a"), node.model("b")
    node.failure = failure
    with pytest.raises(expected):
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
