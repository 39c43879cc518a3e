"""Loading adapters at all replicas, and what ingresses know of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.base.errors import ConfigError, EngineUnavailableError, InvalidRequestError
from serve_app.base.values.adapters import AdapterUse
from serve_app.config.sources import NO_DOWNLOADS, AdapterConfig, ModelSource
from serve_app.server.adapters import AdapterControl
from serve_app.server.answering.openai_answers import model_cards
from serve_app.server.model_registry import ServedModel, find
from serve_app.store.shared_entries import LoadedAdapters
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine
from tests.unit.store import key_values
from tests.unit.store.key_values import KeyValues

LEGAL = AdapterConfig(id="legal", source=ModelSource(path=Path("/legal.gguf")), scale=0.5)
CONFIGURED = AdapterUse("polite", 1.0)


@dataclass
class Scene:
    """One ingress replica, and the replicas of its model."""

    shared: KeyValues
    control: AdapterControl
    models: dict[str, ServedModel]
    workers: SimpleNamespace
    answers: list[Any]
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    async def load(self, config: AdapterConfig = LEGAL) -> None:
        handle: Any = self
        await self.control.load("m", config, handle)

    async def unload(self, name: str) -> None:
        handle: Any = self
        await self.control.unload("m", name, handle)

    async def ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """As a handle of the replicas."""
        self.calls.append((method, *arguments))
        return list(self.answers) if method == "load_adapter" else []

    @property
    def names(self) -> list[str]:
        return [card.id for card in model_cards(self.models)]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    shared = key_values.shared(monkeypatch)
    tokenizer: Any = ByteTokenizer()
    numbers = {0: CONFIGURED}
    models = {
        "m": ServedModel("m", N_CTX_SLOT, tokenizer, engine=ScriptedEngine(), adapters=numbers)
    }
    workers: Any = SimpleNamespace(adapters={})
    configured = SimpleNamespace(id="polite")
    resolved: Any = SimpleNamespace(
        id="m", adapters=(configured,), adapter_uses=(CONFIGURED,), downloads=NO_DOWNLOADS
    )

    async def tell_ingresses() -> None:
        found.calls.append(("look_again",))

    loaded = LoadedAdapters("app")
    control = AdapterControl(models, {"m": resolved}, workers, loaded, tell_ingresses)
    found = Scene(shared, control, models, workers, ["v1", "v1"])
    return found


async def test_all_replicas_load_it_and_all_ingresses_know(scene: Scene) -> None:
    await scene.load()
    assert scene.names == ["m", "m:polite", "m:legal"]
    assert find(scene.models, "m:legal").used == (AdapterUse("legal", 0.5, "v1"),)
    assert scene.workers.adapters == {"m": {0: CONFIGURED, 1: AdapterUse("legal", 0.5, "v1")}}
    assert scene.calls == [("load_adapter", LEGAL), ("look_again",)]
    await scene.unload("legal")
    assert scene.names == ["m", "m:polite"]
    assert scene.workers.adapters == {"m": {0: CONFIGURED}}
    assert scene.calls[2:] == [("look_again",), ("unload_adapter", "legal", "v1")]
    await scene.load()
    assert list(scene.models["m"].adapters) == [0, 2]


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        (["v1", ConfigError("no such file")], InvalidRequestError, "no such file"),
        (["v1", "v2"], InvalidRequestError, "different files"),
        ([], EngineUnavailableError, "No engine"),
    ],
)
async def test_what_one_replica_cannot_load_nobody_has(
    scene: Scene, answers: list[Any], error: type[Exception], message: str
) -> None:
    scene.answers = answers
    with pytest.raises(error, match=message):
        await scene.load()
    versions = {one for one in answers if isinstance(one, str)}
    assert {call[2] for call in scene.calls if call[0] == "unload_adapter"} == versions
    await scene.control.look()
    assert scene.names == ["m", "m:polite"]


async def test_a_name_that_is_taken_stays_whose_it_is(scene: Scene) -> None:
    await scene.load()
    for name in ("legal", "polite"):
        with pytest.raises(InvalidRequestError, match=r"already"):
            await scene.load(LEGAL.model_copy(update={"id": name}))
    assert not [call for call in scene.calls if call[0] == "unload_adapter"]


@pytest.mark.parametrize("name", ["polite", "other"])
async def test_only_what_was_loaded_is_unloaded(scene: Scene, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        await scene.unload(name)


async def test_a_look_without_ray_s_head_changes_nothing(scene: Scene) -> None:
    await scene.load()
    scene.shared.is_away = True
    await scene.control.look()
    assert scene.names == ["m", "m:polite", "m:legal"]
    scene.shared.is_away = False
    LoadedAdapters("app").add("m", LEGAL.model_copy(update={"id": "more"}), "v3")
    await scene.control.look()
    assert scene.names[-1] == "m:more"
