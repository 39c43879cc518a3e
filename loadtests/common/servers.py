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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.common import processes

ROOT = Path(__file__).parents[2]
NO_SETTINGS: Mapping[str, str] = {}
LOG = "log"
"""In a server's directory, what it has printed."""
HEAD_ONLY, DISABLED = "HeadOnly", "Disabled"
"""Places of Serve's proxies: nodes of one machine would share the port. Without any, the ingress listens
itself."""
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
    """Its own, and the tag of its processes; None if it is somebody else's."""

    def pause(self) -> None:
        """Stop all its processes where they are, so that they take no time from others."""
        if self.directory is not None:
            processes.send(self.directory, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them go on."""
        if self.directory is not None:
            processes.send(self.directory, signal.SIGCONT)


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
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}", directory)
    try:
        started = start(command(directory, port), directory, settings)
        try:
            wait_ready(started, lambda: is_ready(server.url), directory)
            yield server
        finally:
            server.go_on()
            processes.stop(started, directory, STOP_TIMEOUT_S)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def serve_run(
    model: Mapping[str, Any],
    settings: Mapping[str, str] | None = None,
    proxy_location: str = HEAD_ONLY,
    **ingress: object,
) -> Iterator[Server]:
    """Corral with this entry of its `models` and these settings of `ingress`, in a Ray cluster of its own:
    as `corral serve --cluster` starts it, or by `serve run` with these environment variables and Serve's
    proxies there."""

    def command(directory: Path, port: int) -> list[str | Path]:
        config = write_config(directory, [model], port, None, BUILD, proxy_location, **ingress)
        return one_machine_command(config) if settings is None else serve_command("run", config)

    with running(command, corral_is_ready, settings or NO_SETTINGS) as server:
        yield server


def serve_command(*arguments: str | Path) -> list[str | Path]:
    """Ray Serve's program of this Python's environment."""
    return [Path(sys.executable).with_name("serve"), *arguments]


def one_machine_command(config: Path) -> list[str | Path]:
    """The command that `corral serve --cluster` ends in."""
    return [sys.executable, "-m", "serve_app.cluster.one_machine", config]


def local_command(config: Path) -> list[str | Path]:
    """The command that `corral serve` runs."""
    return [sys.executable, "-P", "-m", "serve_app.run.local.server", config]


BUILD = "serve_app.app:build"
"""The function that builds the application."""


def write_config(
    directory: Path,
    models: Sequence[Mapping[str, Any]],
    port: int,
    args: Mapping[str, object] | None = None,
    import_path: str = BUILD,
    proxy_location: str = HEAD_ONLY,
    **ingress: object,
) -> Path:
    """A new file for `serve run`: these `models`, other `args` beside them, and settings of `ingress`, on
    this port of loopback. The function at `import_path` builds the application. Serve's proxies are
    there."""
    app = {
        "name": "corral",
        "route_prefix": "/",
        "import_path": import_path,
        "args": {"models": models, "ingress": ingress} | dict(args or {}),
    }
    document = {
        "proxy_location": proxy_location,
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [app],
    }
    config = directory / "serve_config.yaml"
    config.write_text(json.dumps(document))  # is YAML
    return config


def corral_is_ready(url: str, headers: Mapping[str, str] | None = None) -> bool:
    """Whether Corral serves there, and an engine of every model answers. Raises httpx.TransportError."""
    # It is asked again and again, as those below: to read certificates each time takes 26 ms of a core.
    stats = httpx.get(f"{url}/v1/stats", headers=headers, verify=False)
    return stats.is_success and all(model["replicas"] for model in stats.json()["models"])


def is_healthy(url: str) -> bool:
    """Whether /health says so."""
    return httpx.get(f"{url}/health", verify=False).is_success


def lists_models(url: str) -> bool:
    """Whether an OpenAI server answers there."""
    return httpx.get(f"{url}/v1/models", verify=False).is_success


def exit_on_sigterm() -> None:
    """From here on SIGTERM ends this process as an exception does: servers are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def start(
    command: Sequence[str | Path], directory: Path, settings: Mapping[str, str] = NO_SETTINGS
) -> subprocess.Popen[bytes]:
    """Start a server with signals at their defaults, `directory` as the tag of its processes and these
    environment variables, in no other Ray cluster. Its output goes to `directory/log`."""
    ours = {processes.TAG: str(directory), "RAY_USAGE_STATS_ENABLED": "0"}
    environment = os.environ | ours | dict(settings)
    environment.pop("RAY_ADDRESS", None)  # somebody's cluster
    with (directory / LOG).open("wb") as output:
        return subprocess.Popen(
            processes.with_default_signals(*command),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def wait_ready(
    server: subprocess.Popen[bytes], is_ready: Callable[[], bool], directory: Path
) -> None:
    """Wait until it is. Raises RuntimeError with the log if the server ends, or is not ready in
    START_TIMEOUT_S."""

    def ended_or_ready() -> bool:
        with suppress(httpx.TransportError):
            return server.poll() is not None or is_ready()
        return False

    if not processes.within(START_TIMEOUT_S, ended_or_ready) or server.poll() is not None:
        log = (directory / LOG).read_text(errors="replace")
        raise RuntimeError(f"The server did not start:\n{log}")
