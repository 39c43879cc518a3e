"""A local server's own folder, and models that cannot be loaded."""

import asyncio
import fcntl
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import pytest

from serve_app.base.errors import (
    ConfigError,
    CorralError,
    EngineFailedError,
    EngineUnavailableError,
)
from serve_app.channel import routing_reports
from serve_app.channel.protocol import Address
from serve_app.config.schema import parse
from serve_app.run.local import handle, server
from serve_app.run.local.calls import Connection
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
    num_cpus: float = 1.0


class _DyingChild(EngineChild):
    """A process that ends before it has loaded anything."""

    n_started = 0

    def __init__(self, _: Path) -> None:
        type(self).n_started += 1
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])


@pytest.mark.parametrize("steady_s", [60.0, -1.0])
async def test_a_model_that_no_process_could_load_is_given_up_however_long_they_try(
    steady_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_DyingChild, "n_started", 0)
    monkeypatch.setattr(handle, "_STEADY_S", steady_s)
    monkeypatch.setattr(handle, "EngineChild", _DyingChild)
    monkeypatch.setattr(handle, "_PAUSES_S", (0.0,))
    model = cast(Any, _Model("m", "m"))
    with pytest.raises(EngineFailedError):
        await LocalHandle(model, tmp_path, 1.0).keep(_DyingChild(tmp_path))
    assert _DyingChild.n_started == 3


class _ScriptedChild(EngineChild):
    """A process that answers `start` with the next of these outcomes, and other calls with their names."""

    outcomes: ClassVar[list[CorralError | None]] = []
    ends: ClassVar[list[Connection]] = []

    def __init__(self, _: Path) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self.process = subprocess.Popen(["true"])
        self._serving = asyncio.create_task(self._serve(theirs, self.outcomes.pop(0)))

    async def _serve(self, theirs: socket.socket, outcome: CorralError | None) -> None:
        def answer(method: str) -> Any:
            async def called(*_: object) -> object:
                return outcome if method == "start" else method

            return called

        _, end = await asyncio.get_running_loop().create_unix_connection(
            lambda: Connection(answer, lambda: None), sock=theirs
        )
        self.ends.append(end)


async def test_a_model_that_cannot_load_again_says_why_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "EngineChild", _ScriptedChild)
    monkeypatch.setattr(handle, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(_ScriptedChild, "outcomes", [None, ConfigError("it is cut"), None])
    tried, on = asyncio.Event(), asyncio.Event()

    async def wait(_: float) -> None:
        if len(_ScriptedChild.outcomes) == 1:  # before the last start
            tried.set()
            await on.wait()

    local = LocalHandle(cast(Any, _Model("m", "m")), tmp_path, 1.0)
    keeping = asyncio.create_task(local.keep(_ScriptedChild(tmp_path)))
    async with asyncio.timeout(60):
        assert await local.call("stats") == "stats"
        monkeypatch.setattr(handle, "_pause", wait)
        waiting = asyncio.create_task(_call_after_loss(local))
        _ScriptedChild.ends.pop().close()
        await tried.wait()
        for call in (waiting, local.call("stats")):
            with pytest.raises(EngineUnavailableError, match="cannot be loaded: it is cut"):
                await call
        assert local.running() == frozenset()
        on.set()
        while local.failure is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await local.call("stats") == "stats"
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_model_goes_on_when_there_can_be_a_process_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(_ScriptedChild, "outcomes", [None, None])
    local = LocalHandle(cast(Any, _Model("m", "m")), tmp_path, 1.0)
    first, reasons = _ScriptedChild(tmp_path), list[str]()

    def start(folder: Path) -> EngineChild:
        if not reasons:
            reasons.append("none is free")
            raise OSError(11, reasons[0])
        assert reasons[0] in str(local.failure)
        return _ScriptedChild(folder)

    monkeypatch.setattr(handle, "EngineChild", start)
    keeping = asyncio.create_task(local.keep(first))
    async with asyncio.timeout(60):
        assert await local.call("stats") == "stats"
        _ScriptedChild.ends.pop().close()
        while not reasons or local.failure is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await local.call("stats") == "stats"
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_copy_of_a_model_is_asked_as_often_whether_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "EngineChild", _ScriptedChild)
    monkeypatch.setattr(_ScriptedChild, "outcomes", [None])
    monkeypatch.setattr(routing_reports.HERE, "address", Address("n", "p", "127.0.0.1", 1, "s"))
    checks = {"health_check_period_s": 2.0, "health_check_timeout_s": 300.0}
    serve = {**checks, "ray_actor_options": {"num_cpus": 1}}
    app = parse({"models": [{"id": "a", "source": {"builtin": True}, "serve": serve}]})
    model = cast(Any, _Model("b", "b"))
    local = server.LocalServer(app, [model], cast(Any, None), tmp_path)
    copied = local.entry("a")
    assert copied is not None
    assert copied["serve"] == checks
    handle = await local.start({**copied, "id": "b"}, model)
    assert handle._options.health_check_timeout_s == 300.0
    async with asyncio.timeout(60):
        while not handle.running():  # noqa: ASYNC110
            await asyncio.sleep(0)
    await local.stop("b")


async def _call_after_loss(local: LocalHandle) -> Any:
    """A call of a process that is lost, and then has none."""
    while local.running():  # noqa: ASYNC110
        await asyncio.sleep(0)
    return await local.call("stats")


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
