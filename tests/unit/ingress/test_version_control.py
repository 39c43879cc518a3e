"""Weights that change while serving: what one ingress replica knows, keeps and tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from serve_app.errors import EngineFailedError, InvalidRequestError
from serve_app.ingress.model_registry import ServedModel
from serve_app.ingress.versions.control import VersionControl
from serve_app.store.shared_entries import MOST_CHANGES, VersionWeights
from serve_app.types import Version
from tests.doubles.api import build_api
from tests.unit.ingress.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine
from tests.unit.store import key_values
from tests.unit.store.key_values import KeyValues


class LoadableEngine(ScriptedEngine):
    """It is loaded when it is asked to be, unless it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.is_loaded = True
        self.n_loads = 0
        self.fails = False

    async def load(self) -> None:
        self.n_loads += 1
        if self.fails:
            raise EngineFailedError("It cannot be loaded.")
        self.is_loaded = True


class Others:
    """The other ingresses."""

    def __init__(self) -> None:
        self.n_told = 0

    async def tell(self) -> None:
        self.n_told += 1


@dataclass
class Ingress:
    """One replica, as of a configuration."""

    control: VersionControl
    models: dict[str, ServedModel]
    engines: dict[str, LoadableEngine]
    others: Others = field(default_factory=Others)

    async def given(self) -> dict[str, float]:
        await self.control.look()
        return {name.removeprefix("m@"): one for name, one in self.control.given().items()}


Start = Callable[..., Any]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> KeyValues:
    return key_values.shared(monkeypatch)


@pytest.fixture
def start(shared: KeyValues) -> Start:
    """Starts an ingress whose configuration has these weights."""

    async def one(*, on_demand: bool = False, **weights: float) -> Ingress:
        tokenizer: Any = ByteTokenizer()
        engines = {name: LoadableEngine() for name in weights}
        models = {
            f"m@{name}": ServedModel(
                f"m@{name}",
                N_CTX_SLOT,
                tokenizer,
                engine=engines[name],
                version=Version("m", name, weight),
                is_on_demand=on_demand,
            )
            for name, weight in weights.items()
        }
        others: Any = Others()
        control = VersionControl(models, VersionWeights("app"), others.tell)
        await control.start()
        return Ingress(control, models, engines, others)

    return one


async def test_a_change_is_known_to_all_ingresses_and_outlives_them(start: Start) -> None:
    first, second = await start(old=100, new=0), await start(old=100, new=0)
    await first.control.change("m", {"new": 10})
    assert first.others.n_told == 1
    expected = {"old": 90, "new": 10}
    assert await first.given() == await second.given() == expected
    assert await (await start(old=100, new=0)).given() == expected
    version = second.models["m@new"].version
    assert version is not None
    assert version.present_weight == 10


async def test_a_configuration_with_other_weights_counts_from_its_start(start: Start) -> None:
    before = await start(old=100, new=0)
    await before.control.change("m", {"new": 10})
    assert await (await start(old=50, new=50)).given() == {"old": 50, "new": 50}


async def test_back_again_is_one_step_from_any_share(start: Start) -> None:
    ingress = await start(old=100, new=0)
    for percent in (10, 50, 100):
        await ingress.control.change("m", {"new": percent})
    await ingress.control.roll_back("m")
    assert await ingress.given() == {"old": 100, "new": 0}
    await ingress.control.roll_back("m")
    assert await ingress.given() == {"old": 0, "new": 100}


async def test_back_again_after_a_deploy(start: Start) -> None:
    await start(old=100, new=0)
    ingress = await start(old=0, new=100)
    await ingress.control.roll_back("m")
    assert await ingress.given() == {"old": 100, "new": 0}


async def test_back_to_one_that_had_everything_as_another_could_not_answer(start: Start) -> None:
    ingress = await start(old=50, new=0, damaged=50)
    ingress.engines["damaged"].is_loaded = False
    await ingress.control.change("m", {"new": 50, "damaged": 0})
    await ingress.control.change("m", {"new": 100})
    await ingress.control.roll_back("m")
    assert await ingress.given() == {"old": 100, "new": 0, "damaged": 0}


async def test_there_is_nothing_to_go_back_to(start: Start) -> None:
    ingress = await start(old=50, new=50)
    with pytest.raises(InvalidRequestError, match="nothing to go back to"):
        await ingress.control.roll_back("m")


async def test_a_version_that_is_not_loaded_is_given_nothing(start: Start) -> None:
    ingress = await start(old=50, new=50)
    ingress.engines["new"].is_loaded = False
    assert await ingress.given() == {"old": 50, "new": 0}
    ingress.engines["new"].is_loaded = True
    assert await ingress.given() == {"old": 50, "new": 50}


async def test_a_version_on_demand_is_loaded_before_it_is_given_anything(start: Start) -> None:
    ingress = await start(on_demand=True, old=100, new=0)
    new = ingress.engines["new"]
    new.is_loaded = False
    ingress = await start(on_demand=True, old=100, new=0)
    ingress.engines["new"].is_loaded = False
    ingress.control._came.discard("m@new")
    new = ingress.engines["new"]
    new.fails = True
    await ingress.control.change("m", {"new": 10})
    assert await ingress.given() == {"old": 90, "new": 0}
    await asyncio.sleep(0)
    new.fails = False
    await ingress.control.look()
    await asyncio.sleep(0)
    assert new.n_loads >= 1
    assert await ingress.given() == {"old": 90, "new": 10}
    new.is_loaded = False  # nobody has asked for long
    assert await ingress.given() == {"old": 90, "new": 10}


async def test_a_head_that_is_away_changes_nothing(start: Start, shared: KeyValues) -> None:
    ingress = await start(old=100, new=0)
    await ingress.control.change("m", {"new": 10})
    shared.is_away = True
    assert await ingress.given() == {"old": 90, "new": 10}


async def test_old_changes_are_forgotten(start: Start, shared: KeyValues) -> None:
    ingress = await start(old=100, new=0)
    for number in range(2 * MOST_CHANGES):
        await ingress.control.change("m", {"new": number % 90})
    assert len(shared.values) == MOST_CHANGES
    assert await ingress.given() == pytest.approx({"old": 37, "new": 63})


@asynccontextmanager
async def client_of(ingress: Ingress | None) -> AsyncIterator[httpx.AsyncClient]:
    tokenizer: Any = ByteTokenizer()
    alone = {"alone": ServedModel("alone", N_CTX_SLOT, tokenizer, engine=ScriptedEngine())}
    models = alone if ingress is None else ingress.models
    api = build_api(models, versions=None if ingress is None else ingress.control)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(api, raise_app_exceptions=False), base_url="http://127.0.0.1"
    ) as client:
        yield client


async def test_operators_change_weights_over_http(start: Start) -> None:
    async with client_of(await start(old=100, new=0)) as client:
        answer = await client.post("/models/weights", json={"model": "m", "weights": {"new": 25}})
        told = [(one["id"], one["weight"], one["share"]) for one in answer.json()["versions"]]
        assert told == [("m@old", 75, 0.75), ("m@new", 25, 0.25)]
        listed = (await client.get("/v1/models/m")).json()
        assert [one["share"] for one in listed["versions"]] == [0.75, 0.25]
        stats = (await client.get("/v1/stats")).json()["models"]
        assert [one["version"]["weight"] for one in stats] == [75, 25]
        answer = await client.post("/models/rollback", json={"model": "m@new"})
        assert [one["share"] for one in answer.json()["versions"]] == [1, 0]


async def test_answers_say_which_version_they_are_of(start: Start) -> None:
    async with client_of(await start(old=0, new=100)) as client:
        for name, expected in (("m", "m@new"), ("m@old", "m@old"), (None, "m@new")):
            body = {"prompt": "Hello", "max_tokens": 4} | ({"model": name} if name else {})
            assert (await client.post("/v1/completions", json=body)).json()["model"] == expected


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("weights", {"model": "m", "weights": {"newer": 1}}, 400, "no version 'newer'"),
        ("weights", {"model": "m", "weights": {"new": 101}}, 400, "less than or equal to 100"),
        ("weights", {"model": "m", "weights": {}}, 400, "at least 1"),
        ("weights", {"model": "other", "weights": {"new": 1}}, 404, "other"),
        ("rollback", {"model": "m"}, 400, "nothing to go back to"),
    ],
)
async def test_refused_changes(
    start: Start, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    async with client_of(await start(old=100, new=0)) as client:
        answer = await client.post(f"/models/{path}", json=body)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]


async def test_a_model_with_one_version_has_no_weights() -> None:
    async with client_of(None) as client:
        body = {"model": "alone", "weights": {"new": 10}}
        answer = await client.post("/models/weights", json=body)
        assert answer.status_code == 400
        assert "one version only" in answer.json()["error"]["message"]
