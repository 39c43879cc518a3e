"""Parts of the programs that serve one machine, with Ray or without: arguments, events, the file."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from serve_app.base.folders import cache_folder

Content = Mapping[str, Any]
"""The contents of a configuration file of Serve."""
KEEP_ALIVE_S = 620
"""Longer than proxies keep connections, or they would send requests on ones that end: Caddy 120 s, Google's
load balancers 600 s."""
DRAIN_S = 600.0
"""The longest time that running answers have to end, unless `graceful_shutdown_timeout_s` says another."""
OWN_HTTP_OPTIONS = {"host", "port", "keep_alive_timeout_s"}
"""The fields of Serve's `http_options` that an ingress needs to listen itself."""
_LOCATIONS = ("Disabled", "HeadOnly", "EveryNode")
_PLAIN = {"proxy_location", "http_options", "grpc_options", "applications"}
_PLAIN_APPLICATION = {"name", "route_prefix", "import_path", "args"}


def is_plain(content: Content) -> bool:
    """Whether the file says no more than what Corral serves, and where."""
    applications = content.get("applications") or []
    return (
        content.keys() <= _PLAIN
        and len(applications) == 1
        and applications[0].keys() <= _PLAIN_APPLICATION
        and applications[0].get("import_path") == "serve_app.app:build"
    )


def why_proxies(content: Content) -> str | None:
    """Why only Ray Serve's proxies can serve this configuration, as far as its text tells; None if an
    ingress can listen itself."""
    if not is_plain(content):
        return "the file has more than one application of Corral"
    (application,) = content["applications"]
    if application.get("route_prefix", "/") != "/" or content.get("grpc_options"):
        return "the file has a route_prefix or grpc_options"
    if others := (content.get("http_options") or {}).keys() - OWN_HTTP_OPTIONS:
        return f"http_options.{min(others)}"
    if content.get("proxy_location", "HeadOnly") not in _LOCATIONS:
        return "proxy_location"
    return None


def arguments(module: str, about: str | None) -> argparse.Namespace:
    """The arguments of the program that is this module: a configuration, where to listen instead, and the
    pipe that gets events. With such a pipe, the program ends when the process that started it does."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--events", type=int, metavar="FD")
    args = parser.parse_args()
    if args.events is not None:
        threading.Thread(target=watch_parent, daemon=True).start()
    return args


def allow_most_files() -> None:
    """Let this process and those that it starts have as many files open as the system allows them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS says that there is no limit, and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def content_of(config: Path, **http: str | int | None) -> dict[str, Any]:
    """The contents of a configuration file of Serve, with these `http_options` that are not None."""
    content: dict[str, Any] = yaml.safe_load(config.read_text())
    if given := {name: value for name, value in http.items() if value is not None}:
        content["http_options"] = (content.get("http_options") or {}) | given
    return content


def tell(events: int | None, kind: str, text: str = "") -> None:
    """Tell who started this program what has happened: on the pipe for events, or else on the terminal."""
    if events is not None:
        os.write(events, json.dumps({"kind": kind, "text": text}).encode() + b"\n")
    elif kind == "failed":
        print(text, file=sys.stderr, flush=True)
    elif kind == "running":
        print("The server is running.", flush=True)


def watch_parent() -> None:
    """Wait for the end of standard input, and then for SIGTERM to end this process."""
    while os.read(0, 1):  # not by sys.stdin, whose lock would be held at the end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def discoverable(port: int, target: str) -> Iterator[None]:
    """Keep a file that tells Prometheus where the metrics of the server at this port are, as Ray's
    dashboard does. Its folder lasts, and is the server's own, unlike Ray's."""
    file = cache_folder() / "prometheus" / f"server-{port}.json"
    with suppress(OSError):  # metrics are no reason not to serve
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([{"labels": {"job": "corral"}, "targets": [target]}]))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()
