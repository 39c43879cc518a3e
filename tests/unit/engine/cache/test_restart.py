"""Prefixes that outlive the engine."""

from __future__ import annotations

from pathlib import Path

from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import ask, continuation, endless, options, request, running

STORY = "a story that is long enough to be kept, "


def tell(folder: Path, key: bytes = b"fake") -> int:
    """Ask an engine that has just started; returns how much of the prompt it found on disk."""
    backend = FakeBackend(endless, n_slots=2)
    backend.state_key = key
    sizes = options(2, cache_ram_bytes=10_000, prefix_folder=folder)
    with running(backend, sizes) as engine:
        inbox = ask(engine, request("a", STORY + "and so on"))
        assert inbox.token_ids == continuation((STORY + "and so on").encode(), 4)
        ask(engine, request("b", "something else entirely, and not the story"))
        engine.close()
        return inbox.end.usage.cached_tokens


def test_the_next_engine_starts_from_them(tmp_path: Path) -> None:
    assert tell(tmp_path) == 0
    assert tell(tmp_path) == len(STORY + "and so on") - 1
    assert tell(tmp_path, b"another model") == 0
    assert tell(tmp_path) == len(STORY + "and so on") - 1


def test_damaged_files_are_not_used(tmp_path: Path) -> None:
    assert tell(tmp_path) == 0
    for path in tmp_path.rglob("*.prefix"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert tell(tmp_path) == 0
