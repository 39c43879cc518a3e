"""Corral as its users run it: `serve run` on a configuration file, in a cluster of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from xdist.scheduler import LoadFileScheduling

from loadtests.common import processes, servers
from tests.integration.store import hub_server
from tests.integration.store.hub_server import Hub
from tools.random_models.model import SHAPES, write_random_gguf

ROOT = servers.ROOT
START_TIMEOUT_S = servers.START_TIMEOUT_S
DEMO_SLOTS = 4
SETTINGS = {
    "RAY_worker_niceness": "0",  # as on one machine and in clusters
    "RAY_metrics_report_interval_ms": "1000",
}
"""Of every server of these tests, which has a folder for core leases of its own besides."""
DEPLOY_TIMEOUT_S = 240  # on two busy cores, the command alone may take half of that to start


ORDER = ("server/test_alerts", "batch", "cli/", "server/test_hangs", "server/test_local", "")
"""What begins first. Nothing long is left to the end, and what mostly waits goes beside what computes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into that order."""
    places = [f"tests/e2e/{place}" for place in ORDER]
    items.sort(
        key=lambda item: next(
            (i for i, one in enumerate(places) if item.nodeid.startswith(one)), -1
        )
    )


class OneCorral(LoadFileScheduling):  # type: ignore[misc]  # which has no types
    """All files that share the server `corral` are for one process, which starts it once."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "corral" if _shares_corral(file) else file


@cache
def _shares_corral(file: str) -> bool:
    source = (ROOT / file).read_text()
    return (
        file.startswith("tests/e2e/") and "corral: Corral" in source and "def corral(" not in source
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Distribute files so."""
    return OneCorral(config, log) if config.getoption("dist") == "loadfile" else None


def wait_until(
    condition: Callable[[], bool],
    timeout_s: float,
    what: str | Callable[[], str],
    every_s: float = 0.05,
) -> None:
    """Poll until the condition holds; fails with `what` if it does not."""
    if not processes.within(timeout_s, condition, every_s):
        told = what if isinstance(what, str) else what()
        pytest.fail(f"not within {timeout_s} s: {told}")


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

    def __init__(
        self,
        directory: Path,
        models: list[dict[str, Any]],
        *,
        one_machine: bool = False,
        local: bool = False,
        args: Mapping[str, object] | None = None,
        import_path: str = servers.BUILD,
        **ingress: Any,
    ) -> None:
        """As `corral serve` starts it, with Ray or without, or by `serve run`, as in clusters. `args` are
        the application's beside `models`; `ingress` are settings of that."""
        self.directory = directory
        self.port = servers.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._config = servers.write_config(
            directory, models, self.port, args, import_path, **ingress
        )
        self._log = directory / servers.LOG
        command: Sequence[str | Path] = servers.serve_command("run", self._config)
        if local:
            command = servers.local_command(self._config)
        elif one_machine:
            command = servers.one_machine_command(self._config)
        self.process = servers.start(
            command, directory, SETTINGS | {"XDG_RUNTIME_DIR": str(directory)}
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
        command = servers.serve_command("deploy", self._config, "--address", f"http://{found[1]}")
        subprocess.run(
            processes.with_default_signals(*command),
            cwd=ROOT,
            env=os.environ | {"RAY_AUTH_MODE": "token"},
            check=True,
            timeout=DEPLOY_TIMEOUT_S,
        )

    def wait_ready(self) -> None:
        """Wait until an engine of every model answers."""

        def ready() -> bool:
            return servers.corral_is_ready(self.url, self.http.headers)

        servers.wait_ready(self.process, ready, self.directory)

    def wait_for_model(self, name: str) -> None:
        """Wait until an engine of this model answers."""

        def ready() -> bool:
            models = httpx.get(f"{self.url}/v1/stats", verify=False).json()["models"]
            return any(model["id"] == name and model["replicas"] for model in models)

        servers.wait_ready(self.process, ready, self.directory)

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
        return processes.tagged(self.directory, name)

    def stop(self) -> None:
        """Ctrl-C, and wait until all of it is gone."""
        self.http.close()
        by_itself = processes.stop(self.process, self.directory, servers.STOP_TIMEOUT_S)
        print(self.log)  # pytest shows it where a test has failed
        assert by_itself, "some of its processes had to be killed"


def model(path: Path | None, model_id: str, **engine: int | str) -> dict[str, Any]:
    """One entry of `models`, of the built-in one if there is no path: half a core, so that several
    fit on a small machine."""
    return {
        "id": model_id,
        "source": {"builtin": True} if path is None else {"path": str(path)},
        "engine": {"threads": 1, **engine},
        "serve": {"ray_actor_options": {"num_cpus": 0.5}},
    }


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")  # its logits do not depend on the batch
    return path


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough for the sockets that Ray puts into it; deleted at the end."""
    directory = Path(tempfile.mkdtemp(prefix="corral-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def stopped_at_the_end(server: Corral) -> Iterator[Corral]:
    """The server, once all its models answer; stopped at the end, also if they never do."""
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def starts() -> Iterator[Callable[..., Corral]]:
    """Starts servers, and ends them."""
    started: list[Corral] = []
    with short_folder() as directory:

        def start_one(
            models: list[dict[str, Any]],
            *,
            one_machine: bool = False,
            local: bool = False,
            import_path: str = servers.BUILD,
        ) -> Corral:
            server = Corral(
                directory, models, one_machine=one_machine, local=local, import_path=import_path
            )
            started.append(server)
            return server

        try:
            yield start_one
        finally:
            for corral in started:
                corral.stop()


start = pytest.fixture(starts, name="start")
start_for_module = pytest.fixture(starts, name="start_for_module", scope="module")


@pytest.fixture(scope="module")
def hub(gguf: Path) -> Iterator[Hub]:
    """A hub that has the tiny model."""
    with hub_server.running(Hub({"tiny-Q8_0.gguf": gguf.read_bytes()})) as running:
        yield running


@contextmanager
def settings(environment: Mapping[str, str]) -> Iterator[None]:
    """Servers that are started meanwhile have these environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def without_ray(request: pytest.FixtureRequest) -> bool:
    """Whether the servers of most tests are started without Ray Serve."""
    return bool(request.config.getoption("--without-ray"))


@pytest.fixture(scope="session")
def corral(gguf: Path, without_ray: bool) -> Iterator[Corral]:
    """One server for most tests: "big" has room, "small" is soon full, "demo" makes sense."""
    models = [
        model(gguf, "big", n_slots=16, n_ctx_slot=2048),
        model(gguf, "small", n_slots=1, n_ctx_slot=2048, max_waiting=1),
        model(None, "demo", n_slots=DEMO_SLOTS, n_ctx_slot=2048, max_waiting=16),
    ]
    with short_folder() as directory:
        models[-1]["engine"]["slot_folder"] = str(directory / "slots")
        with stopped_at_the_end(
            Corral(directory, models, one_machine=True, local=without_ray)
        ) as server:
            yield server


@pytest.fixture(scope="session")
def readers_server() -> Iterator[Corral]:
    """The server that readers of the documents have: without Ray, the built-in model, with a folder for
    batches."""
    served = [model(None, "corral-demo", n_slots=4, n_ctx_slot=2048)]
    with short_folder() as directory:
        batch = {"folder": str(directory / "batches")}
        with stopped_at_the_end(Corral(directory, served, local=True, batch=batch)) as server:
            yield server


def sse(line: str) -> Any:
    """The JSON of one `data:` line."""
    return json.loads(line.removeprefix("data: "))
