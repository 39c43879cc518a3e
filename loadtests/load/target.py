"""The server that a load test loads: somebody's, by its URL, or one that is started for it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from loadtests.common.processes import command_line, tagged
from loadtests.common.servers import corral_is_ready, running, serve_command

API_KEY = "CORRAL_API_KEY"
"""The environment variable of the key to ask with, if the server wants one; Locust reads it, too."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `directory` is the tag of the processes of one that was started here; else None."""

    url: str
    config: dict[str, Any] | None = None
    directory: Path | None = None

    def stats(self) -> dict[str, Any]:
        """The server's statistics; without models if it is not Corral. Raises httpx.HTTPError."""
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(f"{self.url}/v1/stats", headers=headers, timeout=10)
        if answer.status_code == 404:
            return {"models": []}
        stats: dict[str, Any] = answer.raise_for_status().json()
        return stats

    def pids(self, name: str = "") -> list[int]:
        """Its live processes whose command lines hold the name; none if it was not started here."""
        if self.directory is None:
            return []
        return tagged(self.directory, name)

    def kill_replica(self) -> int:
        """SIGKILL for one engine replica; its process id. Raises LookupError if there is none that was
        started here."""
        found = [pid for pid in self.pids("ray::ServeReplica") if ":engine-" in command_line(pid)]
        if not found:
            raise LookupError("No replica's process was started here.")
        os.kill(found[0], signal.SIGKILL)
        return found[0]


@contextmanager
def opened(url: str | None, config: Path | None) -> Iterator[Target]:
    """The server at the URL, or `serve run` with this configuration file, on a free port of loopback, in a
    Ray cluster of its own that ends with the block."""
    if url is not None:
        yield Target(url.rstrip("/"))
        return
    assert config is not None
    content = yaml.safe_load(config.read_text())

    def command(directory: Path, port: int) -> list[str | Path]:
        http_options = {"http_options": {"host": "127.0.0.1", "port": port}}
        file = directory / "serve_config.yaml"
        file.write_text(json.dumps(content | http_options))  # is YAML
        return serve_command("run", file)

    with running(command, corral_is_ready) as server:
        yield Target(server.url, content, server.directory)
