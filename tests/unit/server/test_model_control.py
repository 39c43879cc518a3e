"""Models that come and go while an ingress serves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serve_app.base.errors import (
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    PermissionDeniedError,
)
from serve_app.config.sources import NO_DOWNLOADS, ModelSource
from serve_app.server import model_control
from serve_app.server.model_control import KEEP_ALIVE, ModelControl, model_id_of
from serve_app.server.model_registry import ServedModel
from serve_app.store import shared_entries
from serve_app.store.shared_entries import AddedModels, FolderValues
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine


def served(model_id: str, *aliases: str) -> ServedModel:
    tokenizer: Any = ByteTokenizer()
    return ServedModel(model_id, N_CTX_SLOT, tokenizer, aliases=aliases, engine=ScriptedEngine())


class Scene:
    """A server with one configured model, `m`, whose file is of this machine."""

    configured_models: Sequence[Any] = ()

    def __init__(self, folder: Path, app: str | None = None) -> None:
        self.folder, self.app = folder, app
        self.models = {"m": served("m", "gpt-4o", "*")}
        self.started: dict[str, Mapping[str, Any]] = {}
        control: Any = self
        self.n_told = 0
        self.control = ModelControl(self.models, control, control, self.tell)

    # -- the host -----------------------------------------------------------------------------

    def added_models(self) -> AddedModels:
        return AddedModels(self.folder, self.app)

    def entry(self, model_id: str) -> Mapping[str, Any] | None:
        return (
            {"source": {"path": "/m.gguf"}, "engine": {"n_slots": 2}} if model_id == "m" else None
        )

    async def resolve(self, entry: Mapping[str, Any]) -> Any:
        if entry["source"].get("repo") == "nobody/nothing":
            raise ConfigError("nobody/nothing: there is no such repository.")
        if entry["source"].get("repo") == "llama":
            raise ConfigError("invalid configuration: models.5.source: Value error, repo: no name.")
        nothing: dict[str, Any] = {"projector": None, "draft": None, "adapters": ()}
        source = ModelSource.model_validate(entry["source"])
        return SimpleNamespace(id=entry["id"], source=source, downloads=NO_DOWNLOADS, **nothing)

    async def start(self, entry: Mapping[str, Any], model: Any) -> Any:
        self.started[model.id] = entry
        return None

    async def stop(self, model_id: str) -> None:
        del self.started[model_id]

    async def tell(self) -> None:
        self.n_told += 1

    # -- the ingress --------------------------------------------------------------------------

    async def add(self, models: Sequence[tuple[Any, Any]]) -> None:
        self.models |= {model.id: served(model.id) for model, _ in models}

    async def drop(self, model_id: str) -> None:
        del self.models[model_id]

    async def create(self, name: str, origin: str, **changes: Any) -> list[str]:
        return [step.status async for step in self.control.create(name, origin, changes)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_model_is_made_of_one_that_is_served(scene: Scene) -> None:
    defaults = {"system_prompt": "You are Mario."}
    steps = await scene.create("mario:latest", "gpt-4o", defaults=defaults, engine={"n_keep": 3})
    assert steps == ["pulling manifest", "writing manifest", "success"]
    assert scene.started["mario"] == {
        "id": "mario",
        "source": {"path": "/m.gguf"},
        "engine": {"n_slots": 2, "n_keep": 3},
        "defaults": defaults,
        "keep_alive": KEEP_ALIVE,
    }
    await scene.control.copy("mario", "luigi")
    await scene.create("mario", "luigi", defaults={"max_tokens": 8})
    assert scene.started["mario"]["defaults"] == defaults | {"max_tokens": 8}
    assert list(scene.models) == ["m", "luigi", "mario"]


async def test_the_next_server_has_what_was_added(scene: Scene) -> None:
    await scene.create("a", "m")
    await scene.create("b", "m")
    await scene.control.delete("a")
    assert scene.started.keys() == {"b"}
    later = Scene(scene.folder)
    await later.control.restore()
    assert later.started == scene.started
    assert list(later.models) == ["m", "b"]


async def test_all_ingresses_of_an_application_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    monkeypatch.setattr(shared_entries, "_values", FolderValues(tmp_path / "shared"))
    AddedModels(tmp_path / "a").put({"id": "before", "source": {"path": "/m.gguf"}})
    asked, other = (Scene(tmp_path / name, "corral") for name in "ab")
    for ingress in (asked, other):
        await ingress.control.restore()
        assert list(ingress.models) == ["m", "before"]
    await asked.create("new", "m")
    await asked.create("before", "m", engine={"n_keep": 3})
    assert asked.n_told == 2
    await other.control.look()
    assert other.started == asked.started
    assert other.models.keys() == {"m", "new", "before"}
    await asked.control.delete("new")
    await other.control.look()
    assert list(other.models) == ["m", "before"]
    assert other.started.keys() == {"before"}
    # The next start of the node that was not asked has the same models.
    assert AddedModels(tmp_path / "b").read() == AddedModels(tmp_path / "a").read()


async def test_what_cannot_be_served_any_more_is_left_out(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.added_models().put({"id": "gone", "source": {"repo": "nobody/nothing"}})
    scene.added_models().put({"id": "here", "source": {"path": "/m.gguf"}})
    await scene.control.restore()
    assert list(scene.models) == ["m", "here"]
    assert "gone" in caplog.text


async def test_a_configured_model_is_neither_replaced_nor_removed(scene: Scene) -> None:
    with pytest.raises(InvalidRequestError, match="'m'"):
        await scene.create("m", "m")
    with pytest.raises(PermissionDeniedError, match="configuration"):
        await scene.control.delete("gpt-4o")
    with pytest.raises(ModelNotFoundError):
        await scene.control.delete("whatever")  # the model with the alias * is another one
    with pytest.raises(ModelNotFoundError):
        await scene.control.copy("whatever", "x")
    with pytest.raises(InvalidRequestError, match="no such repository"):
        await scene.create("x", "nobody/nothing")
    with pytest.raises(InvalidRequestError, match=r"^source: repo: no name\.$"):
        await scene.create("x", "llama")
    assert [step.status async for step in scene.control.pull("gpt-4o")] == ["success"]
    assert list(scene.models) == ["m"]


async def test_there_is_a_bound(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_control, "MOST_ADDED", 1)
    await scene.create("a", "m")
    await scene.create("a", "m", engine={"n_slots": 1})
    with pytest.raises(InvalidRequestError, match="1 models"):
        await scene.create("b", "m")


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("mario:latest", "mario"),
        ("hf.co/owner/name:Q4_K_M", "hf.co/owner/name:Q4_K_M"),
        ("https://huggingface.co/owner/name", "huggingface.co/owner/name"),
        ("owner/name@v1", "owner/name"),
    ],
)
def test_names_become_ids(name: str, model_id: str) -> None:
    assert model_id_of(name) == model_id


async def test_who_listens_is_told_what_changes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_control, "_LOOK_EVERY_S", 0.01)
    async with aclosing(scene.control.events()) as events:
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        scene.control.pull_later("nobody/nothing")
        event = await first
        assert (event["model"], event["event"]) == ("nobody/nothing", "download_failed")
        assert "no such repository" in event["data"]["error"]
        await scene.create("n", "m")
        assert await anext(events) == {"model": "*", "event": "models_reload"}
        status = {"event": "model_status", "data": {"status": "loaded"}}
        assert await anext(events) == {"model": "n"} | status
        await scene.control.delete("n")
        assert await anext(events) == {"model": "n", "event": "model_remove"}


async def test_routes(scene: Scene) -> None:
    transport = httpx.ASGITransport(build_api(scene.models, model_control=scene.control))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        copy = {"source": "m", "destination": "n"}
        assert (await client.post("/api/copy", json=copy)).status_code == 200
        listed = (await client.get("/api/tags")).json()["models"]
        assert [model["name"] for model in listed] == ["m:latest", "n:latest", "gpt-4o:latest"]
        body = {"model": "o", "from": "n", "system": "Be brief."}
        lines = (await client.post("/api/create", json=body)).text.splitlines()
        assert lines[-1] == '{"status":"success"}'
        body = {"model": "p", "from": "nobody/nothing"}
        assert "no such repository" in (await client.post("/api/create", json=body)).text
        answer = await client.post("/api/create", json=body | {"stream": False})
        assert (answer.status_code, "no such repository" in answer.json()["error"]) == (400, True)
        gone = await client.request("DELETE", "/api/delete", json={"model": "n"})
        assert gone.status_code == 200
        assert (await client.delete("/models", params={"model": "o"})).json() == {"success": True}
        assert (await client.delete("/models", params={"model": "o"})).status_code == 404
        assert list(scene.models) == ["m"]
        pulled = await client.post("/models", json={"model": "m"})
        assert pulled.json() == {"success": True}
