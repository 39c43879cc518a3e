"""Corral as its users run it: `serve run` on a configuration file, in a cluster of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtests.common.servers import environment_of, free_port
from serve_app.demo_model.random_gguf import SHAPES, write_random_gguf

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90
DEMO_SLOTS = 4
STOP_TIMEOUT_S = 60
DEPLOY_TIMEOUT_S = 240  # on two busy cores, the command alone may take half of that to start


def wait_until(
    condition: Callable[[], bool],
    timeout_s: float,
    what: str | Callable[[], str],
    every_s: float = 0.05,
) -> None:
    """Poll until the condition holds; fails with `what` if it does not."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            told = what if isinstance(what, str) else what()
            pytest.fail(f"not within {timeout_s} s: {told}")
        time.sleep(every_s)


@contextmanager
def all_the_time(ask: Callable[[int], object], n_clients: int) -> Iterator[None]:
    """Meanwhile, so many clients do it again and again; what one raises is raised at the end."""
    enough = threading.Event()

    def keep_asking(client: int) -> None:
        while not enough.is_set():
            ask(client)

    with ThreadPoolExecutor(n_clients) as pool:
        clients = [pool.submit(keep_asking, client) for client in range(n_clients)]
        try:
            yield
        finally:
            enough.set()
    for client in clients:
        client.result()


class Corral:
    """A running `serve run` and a client for it."""

    def __init__(self, directory: Path, models: list[dict[str, Any]], **ingress: object) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._config = config = directory / "serve_config.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "proxy_location": "HeadOnly",  # nodes of one machine would share the port
                    "http_options": {"host": "127.0.0.1", "port": self.port},
                    "applications": [
                        {
                            "name": "corral",
                            "route_prefix": "/",
                            "import_path": "serve_app.app:build",
                            "args": {"models": models, "ingress": ingress},
                        }
                    ],
                }
            )
        )
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("serve"), "run", config],
                cwd=ROOT,
                env=os.environ
                | {
                    # Keeps this cluster's files, and Ray's note of "the running cluster", apart.
                    "RAY_TMPDIR": str(directory),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_worker_niceness": "0",  # as on one machine and in clusters
                    "RAY_metrics_report_interval_ms": "1000",
                    "XDG_RUNTIME_DIR": str(directory),  # core leases of its own
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def deploy(self, path: Path | None = None, **engine: int) -> None:
        """`serve deploy` of the same configuration with another file for its first model, or with these
        changes to its engine."""
        config = yaml.safe_load(self._config.read_text())
        changed = config["applications"][0]["args"]["models"][0]
        changed["engine"].update(engine)
        if path is not None:
            changed["source"] = {"path": str(path)}
        self._config.write_text(yaml.safe_dump(config))
        found = re.search(r"dashboard at .*?(127\.0\.0\.1:\d+)", self.log)
        assert found, self.log
        command = Path(sys.executable).with_name("serve"), "deploy", self._config
        subprocess.run(
            [*command, "--address", f"http://{found[1]}"],
            cwd=ROOT,
            env=os.environ | {"RAY_AUTH_MODE": "token"},
            check=True,
            timeout=DEPLOY_TIMEOUT_S,
        )

    def wait_ready(self) -> None:
        """Wait until an engine of every model answers."""

        def ready() -> bool:
            assert self.process.poll() is None, self.log
            try:
                stats = self.http.get("/v1/stats")
            except httpx.TransportError:
                return False
            return stats.status_code == 200 and all(
                model["replicas"] for model in stats.json()["models"]
            )

        wait_until(ready, START_TIMEOUT_S, lambda: f"server ready:\n{self.log}")

    def replicas(self, model: int = 0) -> list[dict[str, Any]]:
        """What each replica of a model tells."""
        found: list[dict[str, Any]] = self.http.get("/v1/stats").json()["models"][model]["replicas"]
        return found

    def stats(self, model: int = 0) -> dict[str, Any]:
        """The engine statistics of a model's only replica."""
        (replica,) = self.replicas(model)
        engine: dict[str, Any] = replica["engine"]
        return engine

    def pids(self, name: str) -> list[int]:
        """This cluster's processes whose command lines hold `name`."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                environ = (directory / "environ").read_bytes().split(b"\0")
                command = (directory / "cmdline").read_bytes()
            except OSError:
                continue
            ours = f"RAY_TMPDIR={self.directory}".encode() in environ
            if ours and command and name.encode() in command:
                found.append(int(directory.name))
        return found

    def stop(self) -> None:
        """Ctrl-C, and wait until all of it is gone."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(STOP_TIMEOUT_S)
        wait_until(lambda: not self.pids(""), STOP_TIMEOUT_S, "every process gone")
        print(self.log)  # pytest shows it where a test has failed


def model(path: Path | None, model_id: str, **engine: int) -> dict[str, Any]:
    """One entry of `models`, of the built-in one if there is no path: half a core, so that several
    fit on a small machine."""
    return {
        "id": model_id,
        "source": {"builtin": True} if path is None else {"path": str(path)},
        "engine": {"threads": 1, **engine},
        "deployment": {"ray_actor_options": {"num_cpus": 0.5}},
    }


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")  # its logits do not depend on the batch
    return path


def starts() -> Iterator[Callable[[list[dict[str, Any]]], Corral]]:
    """Starts servers, and ends them."""
    started: list[Corral] = []
    # Ray puts sockets in here, whose paths must be short.
    directory = Path(tempfile.mkdtemp(prefix="corral-", dir="/tmp"))

    def start_one(models: list[dict[str, Any]]) -> Corral:
        started.append(Corral(directory, models))
        return started[-1]

    try:
        yield start_one
    finally:
        for corral in started:
            corral.stop()
        shutil.rmtree(directory, ignore_errors=True)


start = pytest.fixture(starts, name="start")
start_for_module = pytest.fixture(starts, name="start_for_module", scope="module")


@contextmanager
def settings(environment: Mapping[str, str]) -> Iterator[None]:
    """Servers that are started meanwhile have these environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


ONE_MACHINE = environment_of("one-machine.env")
"""What `make serve` sets; servers without it go the way of clusters."""


@pytest.fixture(scope="session")
def corral(gguf: Path) -> Iterator[Corral]:
    """One server for most tests: "big" has room, "small" is soon full, "demo" makes sense."""
    directory = Path(tempfile.mkdtemp(prefix="corral-", dir="/tmp"))
    models = [
        model(gguf, "big", n_slots=16, n_ctx_slot=2048),
        model(gguf, "small", n_slots=1, n_ctx_slot=2048, max_waiting=1),
        model(None, "demo", n_slots=DEMO_SLOTS, n_ctx_slot=2048, max_waiting=16),
    ]
    models[-1]["engine"]["slot_folder"] = str(directory / "slots")
    with settings(ONE_MACHINE):
        server = Corral(directory, models)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def sse(line: str) -> Any:
    """The JSON of one `data:` line."""
    return json.loads(line.removeprefix("data: "))
