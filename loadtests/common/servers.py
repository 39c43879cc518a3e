"""Servers to measure over HTTP on loopback: started, waited for, and stopped with all that they started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
NO_SETTINGS: Mapping[str, str] = {}
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60


def free_port() -> int:
    """A TCP port of loopback on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers."""

    url: str
    directory: Path | None = None
    """Its own, and the mark of its processes; None if it is somebody else's."""

    def pause(self) -> None:
        """Stop all its processes where they are, so that they take no time from others."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in processes(self.directory) if self.directory else ():
            with suppress(ProcessLookupError):
                os.kill(process, number)


@contextmanager
def running(
    command: Callable[[Path, int], Sequence[str | Path]],
    is_ready: Callable[[str], bool],
    settings: Mapping[str, str] = NO_SETTINGS,
) -> Iterator[Server]:
    """A server that runs inside the `with` block, given once `is_ready(url)` holds.

    `command(directory, port)` says what to start: on this port of loopback, with a directory that is
    removed afterwards, and with these environment variables. At the end every process that the server
    started is gone, by SIGKILL if it must be. Raises RuntimeError with the log if the server ends, or is
    not ready in START_TIMEOUT_S.
    """
    directory = Path(tempfile.mkdtemp(prefix="corral-", dir="/tmp"))  # short: Ray's sockets go in
    log, port = directory / "log", free_port()
    server = Server(f"http://127.0.0.1:{port}", directory)
    try:
        started = _start(command(directory, port), directory, log, settings)
        try:
            _wait_ready(started, lambda: is_ready(server.url), log)
            yield server
        finally:
            server.go_on()
            _stop(started, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def serve_run(
    model: Mapping[str, Any], settings: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`serve run` with this entry of Corral's `models`, in a Ray cluster of its own, and with these
    environment variables, or those of `make serve`. Behind HAProxy it needs no keys, though Corral cannot
    see there that all clients are local."""
    environment = environment_of("one-machine.env") if settings is None else settings

    def command(directory: Path, port: int) -> list[str | Path]:
        hidden = "RAY_SERVE_ENABLE_HA_PROXY" in environment
        config = write_config(directory, model, port, allow_anonymous=hidden)
        return [Path(sys.executable).with_name("serve"), "run", config]

    with running(command, corral_is_ready, environment) as server:
        yield server


def environment_of(name: str) -> dict[str, str]:
    """What a file of `cluster` sets: `one-machine.env`, as `make serve` does, or `haproxy.env`."""
    lines = (ROOT / "cluster" / name).read_text().splitlines()
    return dict(line.split("=") for line in lines if line and not line.startswith("#"))


def haproxy_settings() -> dict[str, str]:
    """The environment of `cluster/haproxy.env`, with ports that nobody uses."""
    ports = {f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("STATS", "METRICS")}
    return environment_of("haproxy.env") | ports


def write_config(
    directory: Path, model: Mapping[str, Any], port: int, *, allow_anonymous: bool = False
) -> Path:
    """A new file for `serve run` with this entry of `models`, on this port of loopback."""
    app = {
        "name": "corral",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": {
            "models": [model],
            "ingress": {"allow_anonymous": allow_anonymous, "anonymous_admin": allow_anonymous},
        },
    }
    http_options = {"host": "127.0.0.1", "port": port}
    config = directory / "serve_config.yaml"
    config.write_text(json.dumps({"http_options": http_options, "applications": [app]}))  # is YAML
    return config


def corral_is_ready(url: str) -> bool:
    """Whether Corral serves there, and an engine of every model answers."""
    stats = httpx.get(f"{url}/v1/stats")
    return stats.is_success and all(model["replicas"] for model in stats.json()["models"])


def is_healthy(url: str) -> bool:
    """Whether /health says so."""
    return httpx.get(f"{url}/health").is_success


def lists_models(url: str) -> bool:
    """Whether an OpenAI server answers there."""
    return httpx.get(f"{url}/v1/models").is_success


def exit_on_sigterm() -> None:
    """From here on SIGTERM ends this process as an exception does: servers are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def _start(
    command: Sequence[str | Path], directory: Path, log: Path, settings: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    ours = {
        "RAY_TMPDIR": str(directory),  # also the mark by which our processes are known
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment = os.environ | ours | dict(settings)
    environment.pop("RAY_ADDRESS", None)  # somebody's cluster
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def _wait_ready(server: subprocess.Popen[bytes], is_ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if is_ready():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"The server did not start:\n{log.read_text(errors='replace')}")


def _stop(server: subprocess.Popen[bytes], directory: Path) -> None:
    """As Ctrl-C does; then by force."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    if not _gone(directory):
        for process in processes(directory):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _gone(directory)
    server.wait(STOP_TIMEOUT_S)


def _gone(directory: Path) -> bool:
    """Whether all of them ended within STOP_TIMEOUT_S."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while processes(directory):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def processes(directory: Path) -> list[int]:
    """Ids of the live processes that were started with this directory: those that have it in their
    environment, and all that descend from these. A process that gives itself a title, as many of Ray's
    do, writes it over its environment."""
    mark = f"RAY_TMPDIR={directory}".encode()
    found: set[int] = set()
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        try:
            state, parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(pid)
            if mark in (process / "environ").read_bytes().split(b"\0"):  # of zombies, it is empty
                found.add(pid)
        except OSError:
            continue  # another user's, or gone by now
    new = list(found)
    while new:
        new = [child for one in new for child in children.get(one, ()) if child not in found]
        found.update(new)
    return sorted(found)
