"""What is kept of the adapters that were loaded while serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.base.errors import InvalidRequestError
from serve_app.base.values.adapters import AdapterUse
from serve_app.config.sources import AdapterConfig, ModelSource
from serve_app.store import shared_entries
from serve_app.store.shared_entries import LoadedAdapters
from tests.unit.store import key_values


@pytest.fixture(params=["a cluster", "a folder"])
def kept(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LoadedAdapters:
    key_values.shared(monkeypatch)
    if request.param == "a folder":
        shared_entries.keep_in(tmp_path)
    return LoadedAdapters("app")


def config(name: str) -> AdapterConfig:
    return AdapterConfig(id=name, source=ModelSource(path=Path(f"/{name}.gguf")), scale=0.5)


def numbers(kept: LoadedAdapters, model: str = "org/m") -> dict[str, int]:
    return {one.config.id: one.number for one in kept.read(model)}


def test_numbers_are_used_once(kept: LoadedAdapters) -> None:
    for name in "abc":
        kept.add("org/m", config(name), "v1")
    assert numbers(kept) == {"a": 0, "b": 1, "c": 2}
    gone = kept.remove("org/m", "c")
    assert gone is not None
    assert gone.use == AdapterUse("c", 0.5, "v1")
    assert kept.remove("org/m", "c") is None
    kept.add("org/m", config("c"), "v2")
    assert numbers(kept) == {"a": 0, "b": 1, "c": 3}
    assert kept.read("org/m")[-1].config == config("c")


def test_models_and_applications_have_their_own(kept: LoadedAdapters) -> None:
    kept.add("org/m", config("a"), "v1")
    kept.add("m", config("a"), "v1")
    assert numbers(kept, "m") == {"a": 0}
    assert numbers(kept, "org") == {}
    assert LoadedAdapters("other").read("m") == ()


def test_a_name_is_taken_once(kept: LoadedAdapters) -> None:
    kept.add("m", config("a"), "v1")
    with pytest.raises(InvalidRequestError, match="Unload it first"):
        kept.add("m", config("a"), "v2")


def test_of_two_that_come_at_once_the_first_one_counts(
    kept: LoadedAdapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_check_room", lambda *_: None)  # neither sees the other one
    kept.add("m", config("a"), "v1")
    with pytest.raises(InvalidRequestError, match="Unload it first"):
        kept.add("m", config("a"), "v2")
    assert numbers(kept, "m") == {"a": 0}


def test_there_is_an_end(kept: LoadedAdapters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_entries, "MOST_ADAPTERS", 1)
    kept.add("m", config("a"), "v1")
    with pytest.raises(InvalidRequestError, match="1 loaded adapters"):
        kept.add("m", config("b"), "v1")
