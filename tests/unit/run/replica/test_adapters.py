"""The adapters of one replica that come and go."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.base.errors import ConfigError, InvalidRequestError
from serve_app.base.values.adapters import Adapters, AdapterUse
from serve_app.config.sources import NO_DOWNLOADS, AdapterConfig, ModelSource
from serve_app.run.replica import adapters
from serve_app.run.replica.adapters import ReplicaAdapters
from serve_app.store.shared_entries import LoadedAdapters
from tests.unit.store import key_values
from tests.unit.store.key_values import KeyValues

MODEL: Any = SimpleNamespace(id="m", downloads=NO_DOWNLOADS)


@dataclass
class FakeAdapters:
    """An engine's."""

    loaded: list[str] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    in_use: bool = False
    n_tries: int = 0
    tried_again: threading.Event = field(default_factory=threading.Event)

    def check(self, wanted: Adapters) -> None:
        if not {one.key for one in wanted} <= set(self.loaded) - self.hidden:
            raise InvalidRequestError("not here", "lora")

    def load(self, key: str, path: Path) -> None:
        if path.read_bytes() == b"broken":
            raise ConfigError("broken")
        if key not in self.loaded:
            self.loaded.append(key)
        self.hidden.discard(key)

    def hide(self, key: str) -> None:
        self.hidden.add(key)

    def is_hidden(self, key: str) -> bool:
        return key in self.hidden

    def free(self, key: str) -> bool:
        self.n_tries += 1
        if self.n_tries > 1:
            self.tried_again.set()
        if self.in_use:
            return False
        self.loaded.remove(key)
        self.hidden.discard(key)
        return True


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> KeyValues:
    monkeypatch.setattr(adapters, "_RETRY_S", 0.001)
    return key_values.shared(monkeypatch)


def replica(engine: FakeAdapters) -> ReplicaAdapters:
    fake: Any = SimpleNamespace(adapters=engine)
    return ReplicaAdapters(MODEL, fake, LoadedAdapters("app"))


def config(path: Path, content: bytes = b"adapter") -> AdapterConfig:
    path.write_bytes(content)
    return AdapterConfig(id="a", source=ModelSource(path=path))


async def test_what_one_loaded_others_load_when_asked(shared: KeyValues, tmp_path: Path) -> None:
    one, other = FakeAdapters(), FakeAdapters()
    asked = config(tmp_path / "a.gguf")
    version = await replica(one).load(asked)
    use = AdapterUse("a", 1.0, version)
    LoadedAdapters("app").add("m", asked, version)
    late = replica(other)
    await asyncio.gather(late.have((use,)), late.have((use,)))
    await late.have((AdapterUse("configured", 1.0),))
    assert one.loaded == other.loaded == [use.key]
    third = FakeAdapters()
    await replica(third).catch_up()
    assert third.loaded == [use.key]


async def test_one_that_was_unloaded_is_not_loaded(shared: KeyValues) -> None:
    with pytest.raises(InvalidRequestError, match="was unloaded"):
        await replica(FakeAdapters()).have((AdapterUse("a", 1.0, "v"),))


async def test_another_file_of_that_name_is_refused(shared: KeyValues, tmp_path: Path) -> None:
    asked = config(tmp_path / "a.gguf")
    LoadedAdapters("app").add("m", asked, "elsewhere")
    with pytest.raises(ConfigError, match="another file"):
        await replica(FakeAdapters()).have((AdapterUse("a", 1.0, "elsewhere"),))


async def test_what_cannot_be_loaded_does_not_stop_a_start(
    shared: KeyValues, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LoadedAdapters("app").add("m", config(tmp_path / "a.gguf", b"broken"), "v")
    await replica(FakeAdapters()).catch_up()
    shared.is_away = True
    await replica(FakeAdapters()).catch_up()
    assert len([one for one in caplog.messages if "are not loaded" in one]) == 2


async def test_it_is_freed_when_nobody_uses_it(
    shared: KeyValues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_RETRY_S", 0.01)
    engine = FakeAdapters(in_use=True)
    here = replica(engine)
    version = await here.load(config(tmp_path / "a.gguf"))
    here.unload("a", version)
    with pytest.raises(InvalidRequestError):
        engine.check((AdapterUse("a", 1.0, version),))
    await asyncio.to_thread(engine.tried_again.wait, 10)
    assert len(engine.loaded) == 1
    engine.in_use = False
    await asyncio.gather(*here._freeing)
    assert engine.loaded == []


async def test_one_that_is_loaded_again_stays(
    shared: KeyValues, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded_again = asyncio.Event()

    async def nap(delay_s: float) -> None:
        await loaded_again.wait()

    monkeypatch.setattr(adapters, "sleep", nap)
    engine = FakeAdapters()
    here, asked = replica(engine), config(tmp_path / "a.gguf")
    version = await here.load(asked)
    here.unload("a", version)
    assert await here.load(asked) == version
    loaded_again.set()
    await asyncio.gather(*here._freeing)
    assert engine.loaded == [AdapterUse("a", 1.0, version).key]
    assert engine.n_tries == 0
