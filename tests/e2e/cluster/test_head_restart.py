"""The head dies and is started again, with its state in a Redis: workers serve all the while, and stay."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loadtests.common.processes import run_tool, send, tagged, with_default_signals
from loadtests.common.servers import free_port
from tests.e2e.conftest import model, short_folder, wait_until

REDIS = shutil.which("redis-server")
START_TIMEOUT_S = 90
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(REDIS is None, reason="no redis-server here"),
]


class TwoHosts:
    """A head that computes nothing, and a worker with Serve's proxy on a port of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ports = {
            name: free_port() for name in ("ray", "dashboard", "redis", "head", "worker")
        }
        self.redis = subprocess.Popen(
            with_default_signals(
                *(str(REDIS), "--port", str(self._ports["redis"]), "--bind", "127.0.0.1"),
                *("--save", ""),
            ),
            cwd=directory,
            stdout=subprocess.DEVNULL,
        )

    def url(self, host: str) -> str:
        """Where that host's proxy listens."""
        return f"http://127.0.0.1:{self._ports[host]}"

    def run(self, host: str, *command: str | Path) -> None:
        """On that host: one of this environment's programs."""
        settings = {
            "RAY_TMPDIR": str(self.directory / host),  # also the tag of its processes
            "XDG_RUNTIME_DIR": str(self.directory),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef" * 2,
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{self._ports['redis']}",
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self._ports["worker"]),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        log = self.directory / f"{command[0]}-{host}.log"
        assert not run_tool(command, log, os.environ | settings), log.read_text(errors="replace")

    def start(self, host: str) -> None:
        """Its Ray."""
        options = {
            "head": [
                *("--head", f"--port={self._ports['ray']}", "--node-ip-address=127.0.0.1"),
                *(f"--dashboard-port={self._ports['dashboard']}", "--num-cpus=0"),
            ],
            "worker": [
                *(f"--address=127.0.0.1:{self._ports['ray']}", "--num-cpus=1"),
                '--resources={"ingress": 100}',
            ],
        }
        # On one machine Ray finds the worker, and takes its head to be alive.
        for note in self.directory.rglob("ray_current_cluster"):
            note.unlink()
        agent = "--dashboard-agent-listen-port=0"
        self.run(host, "ray", "start", agent, "--object-store-memory=100000000", *options[host])

    def deploy(self, gguf: Path) -> None:
        """One replica and one ingress, both on the worker."""
        ingress = {"ray_actor_options": {"resources": {"ingress": 1}}}
        app = {
            "name": "corral",
            "route_prefix": "/",
            "import_path": "serve_app.app:build",
            "args": {
                "models": [model(gguf, "m", n_slots=4, n_ctx_slot=1024)],
                "ingress": {"serve": ingress},
            },
        }
        http_options = {"host": "127.0.0.1", "port": self._ports["head"]}
        file = self.directory / "serve_config.yaml"
        document = {
            "proxy_location": "EveryNode",
            "http_options": http_options,
            "applications": [app],
        }
        file.write_text(json.dumps(document))
        dashboard = f"http://127.0.0.1:{self._ports['dashboard']}"
        self.run("head", "serve", "deploy", "--address", dashboard, file)

    def kill(self, host: str) -> None:
        """SIGKILL for all that runs there."""

        def gone() -> bool:
            send(self.directory / host, signal.SIGKILL)
            return not tagged(self.directory / host)

        wait_until(gone, 30, f"{host} gone")

    def replicas(self, host: str) -> list[str]:
        """The model's replicas, as that host's proxy knows them; none if it does not answer."""
        try:
            stats = httpx.get(f"{self.url(host)}/v1/stats", timeout=10).json()
        except (httpx.TransportError, ValueError):
            return []
        return [replica["replica_id"] for replica in stats["models"][0]["replicas"]]


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with short_folder() as directory:
        hosts = TwoHosts(directory)
        try:
            yield hosts
        finally:
            for host in ("head", "worker"):
                hosts.kill(host)
            hosts.redis.kill()
            hosts.redis.wait()


@contextmanager
def streaming(url: str) -> Iterator[list[str]]:
    """Meanwhile, two clients read one stream after the other; gives each one's last line."""
    enough, ends = threading.Event(), list[str]()

    def keep_streaming(client: int) -> None:
        body = {"prompt": f"{client}: hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while not enough.is_set():
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                lines = [line for line in response.iter_lines() if line.startswith("data: ")]
                ends.append(lines[-1])

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(keep_streaming, client) for client in range(2)]
        try:
            yield ends
        finally:
            enough.set()
    for client in clients:
        client.result()


def test_workers_serve_while_the_head_is_away_and_stay(hosts: TwoHosts, gguf: Path) -> None:
    hosts.start("head")
    hosts.start("worker")
    hosts.deploy(gguf)
    wait_until(lambda: bool(hosts.replicas("worker")), START_TIMEOUT_S, "served")
    (before,) = hosts.replicas("worker")
    with streaming(hosts.url("worker")) as ends:
        wait_until(lambda: len(ends) >= 2, START_TIMEOUT_S, "streams end")
        hosts.kill("head")
        without = len(ends)
        wait_until(lambda: len(ends) >= without + 6, START_TIMEOUT_S, "streams end without a head")
        hosts.start("head")
        wait_until(lambda: hosts.replicas("head") == [before], START_TIMEOUT_S, "the head knows")
        again = len(ends)
        wait_until(lambda: len(ends) >= again + 4, START_TIMEOUT_S, "streams end with it")
    assert set(ends) == {"data: [DONE]"}
    assert hosts.replicas("worker") == [before]
