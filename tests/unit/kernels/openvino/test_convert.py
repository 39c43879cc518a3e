"""The folder of converted models: its bound, and who may remove what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.base.errors import ConfigError
from serve_app.kernels.openvino.convert import MODEL, ConvertedModels, finish

MIB = 2**20


def make(models: ConvertedModels, name: str, n_bytes: int, last_used: float = 0.0) -> None:
    """A model of that size, as a conversion leaves it."""
    with models.alone(name) as lock:
        assert lock is not None
        part = models.make_room(name, n_bytes)
        (part / MODEL).write_bytes(bytes(n_bytes))
        finish(part)
    os.utime(models.path / ".locks" / name, (last_used, last_used))


def names(models: ConvertedModels) -> set[str]:
    return {path.name for path in models.path.iterdir() if not path.name.startswith(".")}


def test_a_model_is_there_when_it_is_whole(tmp_path: Path) -> None:
    models = ConvertedModels(tmp_path / "openvino")
    assert not models.open("a")
    with models.alone("a") as lock:
        assert lock is not None
        part = models.make_room("a", MIB)
        (part / MODEL).write_bytes(b"half")
        assert not models.open("a")
        finish(part)
    assert models.open("a")
    assert models.of("a").read_bytes() == b"half"


def test_what_a_killed_conversion_left_is_begun_anew(tmp_path: Path) -> None:
    models = ConvertedModels(tmp_path)
    with models.alone("a"):
        (models.make_room("a", MIB) / "openvino_model.bin").write_bytes(b"half")
    assert not models.open("a")
    make(models, "a", 10)
    assert names(models) == {"a"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == [MODEL]


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    models = ConvertedModels(tmp_path, max_bytes=4 * MIB)
    for name, last_used in [("new", 30.0), ("old", 10.0), ("older", 5.0)]:
        make(models, name, MIB, last_used)
    make(models, "more", 2 * MIB, 40.0)
    assert names(models) == {"new", "old", "more"}
    make(models, "most", 3 * MIB, 50.0)
    assert names(models) == {"most"}


def test_one_that_another_process_has_open_stays(tmp_path: Path) -> None:
    models = ConvertedModels(tmp_path, max_bytes=2 * MIB)
    make(models, "used", MIB)
    make(models, "idle", MIB, 9e9)
    code = (
        "import sys; from pathlib import Path\n"
        "from serve_app.kernels.openvino.convert import ConvertedModels\n"
        f"print(ConvertedModels(Path({str(tmp_path)!r})).open('used'), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        os.utime(tmp_path / ".locks" / "used", (1, 1))
        make(models, "new", MIB)
        assert names(models) == {"used", "new"}
        with models.alone("big"), pytest.raises(ConfigError, match=r"max_converted_gib"):
            models.make_room("big", 2 * MIB)
        assert "used" in names(models)


def test_two_do_not_make_the_same(tmp_path: Path) -> None:
    models = ConvertedModels(tmp_path)
    with models.alone("a") as first, models.alone("a") as second:
        assert first is not None
        assert second is None
    make(models, "a", 10)
    assert models.open("a")
    with models.alone("a") as lock:
        assert lock is None
