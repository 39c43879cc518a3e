"""A machine that cannot serve says why in one line, and nothing is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serve_app.app import build
from serve_app.base.errors import ConfigError
from serve_app.cli import serve
from serve_app.cli.config_file import ServeOptions
from serve_app.cluster.replica import process_place
from serve_app.run import preflight


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR", "XDG_CACHE_HOME", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def closed(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Have these folders be read-only, also for root."""
    access = os.access

    def patched(path: Path, mode: int) -> bool:
        return access(path, mode) and not (mode & os.W_OK and Path(path) in folders)

    monkeypatch.setattr(os, "access", patched)


def test_this_machine_lacks_nothing() -> None:
    assert preflight.missing() is None


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_long_temporary_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"/tmp/{'x' * 90}")
    reason = preflight.missing()
    assert reason is not None
    assert "has 95 characters, and Ray's sockets leave room for 39. Set RAY_TMPDIR" in reason
    assert preflight.missing(with_ray=False) is None
    console: Any = None
    with pytest.raises(ConfigError, match="RAY_TMPDIR"):
        serve.run(ServeOptions(), None, console, cluster=True, verbose=False)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/tmp", "The temporary folder /tmp cannot be written to."),
        ("/dev/shm", "/dev/shm cannot be written to, and Ray's processes share memory there."),
        ("HOME", ".ray, which cannot be written to. Set HOME to another folder."),
        ("HOME/.cache/corral", ".cache/corral, which cannot be written to. Set XDG_CACHE_HOME"),
    ],
)
def test_folders_that_cannot_be_written(
    folder: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = Path(folder.replace("HOME", str(tmp_path)))
    path.mkdir(parents=True, exist_ok=True)
    closed(monkeypatch, path)
    assert said in str(preflight.missing())
    needs_ray = folder in ("/dev/shm", "HOME")
    assert (said in str(preflight.missing(with_ray=False))) is not needs_ray


def test_a_token_that_is_there_needs_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose home is read-only, and whose cache is elsewhere."""
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    closed(monkeypatch, tmp_path)
    assert ".ray" in str(preflight.missing())
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert preflight.missing() is None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert "Set HOME" in str(preflight.missing())


def test_a_node_of_a_cluster_says_it_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    args = {"models": [{"id": "m", "source": {"builtin": True}}]}
    preflight.require_cache()
    closed(monkeypatch, tmp_path)
    with pytest.raises(RayServeException) as refused:
        build(args)
    assert str(refused.value) == preflight.missing(with_ray=False)
    assert f"{tmp_path}/.cache/corral, which cannot be written to" in str(refused.value)
    with pytest.raises(ConfigError, match="Set XDG_CACHE_HOME to another folder"):
        process_place(keeps_texts=False)
