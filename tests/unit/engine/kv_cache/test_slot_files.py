"""Slots saved, restored and erased on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from serve_app.engine import Engine, InvalidRequestError
from serve_app.engine.core.command_queue import Command
from serve_app.errors import (
    EngineClosedError,
    EngineUnavailableError,
    NotSupportedError,
    StorageFullError,
)
from tests.unit.engine.harness import (
    SteppedBackend,
    WatchedBackend,
    ask,
    options,
    request,
    running,
    start,
)

PROMPT = "a prompt that is long enough\n"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with running(WatchedBackend(n_slots=2), options(2, slot_folder=tmp_path / "slots")) as engine:
        yield engine


def slot_of(engine: Engine) -> tuple[int, int]:
    """The only slot with tokens, and how many they are."""
    (found,) = [(slot.id, slot.n_past) for slot in engine.stats().slots if slot.n_past]
    return found


def test_what_was_saved_is_there_again(engine: Engine, tmp_path: Path) -> None:
    text = ask(engine, request("a", PROMPT)).text
    slot, n_tokens = slot_of(engine)
    saved = engine.slot_files.save(slot, "a.bin")
    file = tmp_path / "slots" / "a.bin"
    assert (saved.n_tokens, saved.n_bytes) == (n_tokens, file.stat().st_size)
    assert file.stat().st_mode & 0o777 == 0o600
    assert engine.slot_files.erase(slot).n_tokens == n_tokens
    assert not any(one.n_past for one in engine.stats().slots)
    assert ask(engine, request("b", PROMPT)).end.usage.cached_tokens == 0
    engine.slot_files.erase(slot_of(engine)[0])
    restored = engine.slot_files.restore(1, "a.bin")
    assert (restored.n_tokens, restored.n_bytes) == (n_tokens, saved.n_bytes)
    assert slot_of(engine) == (1, n_tokens)
    again = ask(engine, request("c", PROMPT))
    assert again.text == text
    assert again.end.usage.cached_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "x" * 129, "a\0"])
def test_files_are_in_the_folder(engine: Engine, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="filename"):
        engine.slot_files.save(0, name)


@pytest.mark.parametrize("content", [None, b"", b"CorralPx", b"x" * 500])
def test_files_that_are_none(engine: Engine, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "slots").mkdir()
        (tmp_path / "slots" / "a.bin").write_bytes(content)
    with pytest.raises(InvalidRequestError) as refused:
        engine.slot_files.restore(0, "a.bin")
    assert refused.value.param == "filename"


@pytest.mark.parametrize("slot", [-1, 2, 99])
def test_slots_that_are_none(engine: Engine, slot: int) -> None:
    with pytest.raises(InvalidRequestError, match="no slot"):
        engine.slot_files.erase(slot)


def test_it_is_refused_without_a_folder() -> None:
    with running(WatchedBackend(n_slots=1)) as engine:
        with pytest.raises(NotSupportedError, match=r"engine\.slot_folder"):
            engine.slot_files.save(0, "a")
        with pytest.raises(NotSupportedError, match=r"engine\.slot_folder"):
            engine.slot_files.erase(0)


@pytest.mark.parametrize("group", ["", "grüppe"])
def test_files_have_a_bound(tmp_path: Path, group: str) -> None:
    folder = tmp_path / "slots"
    opts = options(2, slot_folder=folder, slot_folder_max_bytes=2000)
    with running(WatchedBackend(n_slots=2), opts) as engine:
        ask(engine, request("a", PROMPT, group=group))
        slot, _ = slot_of(engine)
        size = engine.slot_files.save(slot, "a.bin").n_bytes
        others = 2000 - 2 * size
        assert others > 0
        (folder / "other").write_bytes(b"x" * others)
        assert engine.slot_files.save(slot, "b.bin").n_bytes == size  # to the last byte
        before = sorted(folder.iterdir())
        with pytest.raises(
            StorageFullError, match=rf"{size} bytes.*slot_folder_max_mib"
        ) as refused:
            engine.slot_files.save(slot, "c.bin")
        assert refused.value.status == 507
        assert sorted(folder.iterdir()) == before
        assert engine.slot_files.save(slot, "a.bin").n_bytes == size, "it takes its own place"
        (folder / "b.bin").unlink()
        engine.slot_files.save(slot, "c.bin")


def test_the_disk_is_not_filled(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(engine, request("a", PROMPT))
    slot, _ = slot_of(engine)
    size = engine.slot_files.save(slot, "a.bin").n_bytes
    free = [size - 1]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free[0]))
    with pytest.raises(StorageFullError, match=f"disk has {size - 1} left"):
        engine.slot_files.save(slot, "b.bin")
    assert [file.name for file in (tmp_path / "slots").iterdir()] == ["a.bin"]
    free[0] = size
    engine.slot_files.save(slot, "b.bin")


def test_a_busy_slot_is_left_alone(tmp_path: Path) -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, slot_folder=tmp_path)) as engine:
        (inbox,) = start(engine, request("a", PROMPT))
        backend.wait_for_batch()
        command = Command(lambda cache: cache.erase(0))
        engine._loop.run_between_steps(command)
        backend.step()
        with pytest.raises(EngineUnavailableError, match="busy"):
            command.future.result(0)
        backend.resume()
        inbox.wait()


def test_nothing_is_done_after_the_end(tmp_path: Path) -> None:
    engine = Engine(lambda: WatchedBackend(n_slots=1), options(1, slot_folder=tmp_path))
    engine.close(0)
    with pytest.raises(EngineClosedError):
        engine.slot_files.erase(0)
