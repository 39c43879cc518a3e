"""A local server's own folder, and models that cannot be loaded."""

import fcntl
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from serve_app.base.errors import EngineFailedError
from serve_app.run.local import handle, server
from serve_app.run.local.handle import EngineChild, LocalHandle


def test_the_folders_of_servers_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("corral-local-killed", "corral-local-alive", "corral-local-new", "corral-others"):
        (tmp_path / name).mkdir()
        if not name.endswith("new"):
            (tmp_path / name / "lock").touch()
    with (tmp_path / "corral-local-alive" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with server._own_folder() as own:
            names = {path.name for path in tmp_path.iterdir()}
            assert (own / "entries").is_dir()
            with server._own_folder() as second:
                assert own.is_dir()
                assert second != own
    assert "corral-local-killed" not in names
    assert names >= {"corral-local-alive", "corral-local-new", "corral-others"}
    assert not own.exists()


class _Model(msgspec.Struct):
    id: str
    name: str


class _DyingChild(EngineChild):
    """A process that ends before it has loaded anything."""

    n_started = 0

    def __init__(self, _: Path) -> None:
        type(self).n_started += 1
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])


async def test_a_model_that_no_process_could_load_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "EngineChild", _DyingChild)
    monkeypatch.setattr(handle, "_PAUSES_S", (0.0,))
    model = cast(Any, _Model("m", "m"))
    with pytest.raises(EngineFailedError):
        await LocalHandle(model, tmp_path, 1.0).keep(_DyingChild(tmp_path))
    assert _DyingChild.n_started == 3


def test_a_server_waits_for_its_processes_where_who_started_it_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, two requests and a model that was added failed after workers had died."""
    config, ended = tmp_path / "serve.yaml", list[int]()
    config.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["server", str(config)])
    monkeypatch.setattr(server, "serve", lambda *_: ended.append(subprocess.call(["false"])))
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        server.main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended == [1]
