"""The shipped files of Prometheus, beside a server with API keys: alerts fire for a fault, and clear."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.common import processes, servers
from tests.e2e.conftest import (
    ROOT,
    Corral,
    model,
    settings,
    short_folder,
    stopped_at_the_end,
    wait_until,
)
from tests.e2e.server.test_auth import write_keys

KEY = "sk-prometheus-0123456789"
FLOOD = "sk-flood-0123456789"
SHIPPED = ROOT / "cluster/monitoring"
QUOTAS = Path("/sys/fs/cgroup/cpu")
"""The first version of cgroups, where a test may make a group beside its own."""
TIMEOUT_S = 60

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus here: Debian's package prometheus"
)


class Prometheus:
    """Debian's, with the shipped files. A minute of theirs is a second here, and it looks each second."""

    def __init__(self, folder: Path, discovery: Path) -> None:
        alerts = re.sub(r"(?<=[\[ ])(\d+)m\b", r"\1s", (SHIPPED / "alerts.yml").read_text())
        assert "[15s]" in alerts
        assert "offset 15s" in alerts
        assert "for: 5s" in alerts
        config = (SHIPPED / "prometheus.yml").read_text()
        config = config.replace(
            "scrape_interval: 15s", "scrape_interval: 1s\n  evaluation_interval: 1s"
        )
        config = config.replace("/var/cache/corral/prometheus", str(discovery))
        config = config.replace("/tmp/ray", str(folder))  # somebody's cluster
        (folder / "prometheus.yml").write_text(config)
        (folder / "alerts.yml").write_text(alerts)
        (folder / "corral.key").write_text(f"{KEY}\n")
        self.url = f"http://127.0.0.1:{servers.free_port()}"
        self._log = (folder / "log").open("w")
        command = (
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        )
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(TIMEOUT_S)
        self._log.close()

    def _ask(self, path: str, **params: str) -> dict[str, list[dict[str, Any]]]:
        with suppress(httpx.TransportError):  # while it starts
            url = f"{self.url}/api/v1/{path}"
            answer = httpx.get(url, params=params, timeout=10, verify=False)
            if answer.is_success:
                data: dict[str, list[dict[str, Any]]] = answer.json()["data"]
                return data
        return {"alerts": [], "result": []}

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        found = self._ask("alerts")["alerts"]
        return {str(one["labels"]["alertname"]) for one in found if str(one["state"]) == "firing"}

    def samples(self, query: str) -> list[dict[str, Any]]:
        return self._ask("query", query=query)["result"]


@pytest.fixture
def engine() -> dict[str, int]:
    return {"n_slots": 2, "n_ctx_slot": 512}


@pytest.fixture
def corral(gguf: Path, engine: dict[str, int]) -> Iterator[Corral]:
    with short_folder() as directory, settings({"XDG_CACHE_HOME": str(directory)}):
        flood = {"name": "flood", "key": FLOOD}
        keys = write_keys(directory, {"name": "prometheus", "key": KEY}, flood)
        models = [model(gguf, "m", **engine)]
        server = Corral(directory, models, local=True, api_key_file=str(keys))
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        with stopped_at_the_end(server):
            yield server


@pytest.fixture
def prometheus(corral: Corral, tmp_path: Path) -> Iterator[Prometheus]:
    started = Prometheus(tmp_path, corral.directory / "corral/prometheus")
    try:
        yield started
    finally:
        started.stop()


def test_every_panel_has_a_value(corral: Corral, prometheus: Prometheus) -> None:
    """But for those of the row that only Ray fills."""
    dashboard = json.loads((SHIPPED / "grafana.json").read_text())
    expressions = [
        target["expr"].replace("$__rate_interval", "60s").replace("$model", ".*")
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]

    def is_empty(expression: str) -> bool:
        found = prometheus.samples(expression)
        return not found or any(one["value"][1] == "NaN" for one in found)

    def empty() -> list[str]:
        body = {"model": "m", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        assert corral.http.post("/v1/completions", json=body).status_code == 200
        return [one for one in expressions if is_empty(one)]

    wait_until(lambda: not empty(), TIMEOUT_S, lambda: f"{empty()}", 1.0)


def test_alerts_fire_for_the_fault_and_clear(corral: Corral, prometheus: Prometheus) -> None:
    zero = "ray_corral_lost_replicas_total{model='m'} == 0"

    def told() -> str:
        return f"{prometheus.firing()} {prometheus.samples('up')} {prometheus.samples(zero)}"

    wait_until(lambda: bool(prometheus.samples(zero)), TIMEOUT_S, told)
    reasons = prometheus.samples("ray_corral_requests_total")
    assert {one["metric"]["reason"] for one in reasons} == {"stop", "length", "abort", "error"}
    for _ in range(2):
        wait_until(lambda: not prometheus.firing(), TIMEOUT_S, told)
        (engine,) = processes.tagged(corral.directory, "serve_app.run.local.engine")
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: "CorralReplicaLost" in prometheus.firing(), TIMEOUT_S, told)
    wait_until(lambda: not prometheus.firing(), TIMEOUT_S, told)
    corral.process.send_signal(signal.SIGTERM)
    wait_until(lambda: prometheus.firing() == {"CorralDown"}, TIMEOUT_S, told)


@contextmanager
def asking(
    corral: Corral, n_clients: int, n_tokens: int, *, key: str = KEY, pause_s: float = 0.0
) -> Iterator[None]:
    """Clients that send one request after the other. They leave when the block ends."""
    body = {"model": "m", "prompt": "Hello", "max_tokens": n_tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}

    over = asyncio.Event()

    async def repeat(http: httpx.AsyncClient) -> None:
        while True:
            refused = (await http.post("/v1/completions", json=body)).is_error
            await asyncio.sleep(max(pause_s, 0.2 * refused))

    async def ask() -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(
                base_url=corral.url, headers=headers, timeout=600, limits=limits
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            clients = [group.create_task(repeat(http)) for _ in range(n_clients)]
            await over.wait()
            for client in clients:
                client.cancel()

    with asyncio.Runner() as runner:
        thread = threading.Thread(target=runner.run, args=(ask(),))
        thread.start()
        try:
            yield
        finally:
            runner.get_loop().call_soon_threadsafe(over.set)
            thread.join()


@pytest.mark.long
@pytest.mark.parametrize("engine", [{"n_slots": 1, "n_ctx_slot": 8192, "max_waiting": 100}])
def test_alerts_of_overload_fire_and_clear(corral: Corral, prometheus: Prometheus) -> None:
    """A hundred clients want what one slot does in a minute or more."""
    alerts = {"CorralHighTTFT", "CorralHighBacklog"}

    def told() -> str:
        shown = ("ray_corral_backlog_seconds", "ray_corral_requests_total", "up")
        return f"{prometheus.firing()} {[prometheus.samples(one) for one in shown]}"

    wait_until(lambda: bool(prometheus.samples("ray_corral_backlog_seconds")), TIMEOUT_S, told)
    wait_until(lambda: not prometheus.firing(), TIMEOUT_S, told)
    with asking(corral, 100, 4000):
        wait_until(lambda: prometheus.firing() >= alerts, 3 * TIMEOUT_S, told)
    wait_until(lambda: not prometheus.firing(), 3 * TIMEOUT_S, told)


@pytest.mark.long
@pytest.mark.parametrize("engine", [{"n_slots": 1, "n_ctx_slot": 2048, "max_waiting": 4}])
def test_an_alert_of_errors_fires_and_clears(corral: Corral, prometheus: Prometheus) -> None:
    """A key floods the queue. Each request of another key takes the place of one that waits, which ends."""

    def told() -> str:
        return f"{prometheus.firing()} {prometheus.samples('ray_corral_requests_total')}"

    with asking(corral, 20, 1000, key=FLOOD), asking(corral, 1, 50, pause_s=0.3):
        wait_until(lambda: "CorralHighErrorRate" in prometheus.firing(), 2 * TIMEOUT_S, told)
    wait_until(lambda: not prometheus.firing(), 2 * TIMEOUT_S, told)


@pytest.mark.long
def test_an_alert_of_pauses_fires_and_clears(corral: Corral, prometheus: Prometheus) -> None:
    """Something stops the engine for more than a second, again and again."""

    def told() -> str:
        return f"{prometheus.firing()} {prometheus.samples('ray_corral_inter_token_latency_seconds_count')}"

    (engine,) = processes.tagged(corral.directory, "serve_app.run.local.engine")
    ended = threading.Event()

    def stall() -> None:
        while not ended.is_set():
            os.kill(engine, signal.SIGSTOP)
            ended.wait(1.3)
            os.kill(engine, signal.SIGCONT)
            ended.wait(0.02)

    stalling = threading.Thread(target=stall)
    stalling.start()
    try:
        with asking(corral, 1, 20):
            wait_until(lambda: prometheus.firing() == {"CorralHighITL"}, 2 * TIMEOUT_S, told)
    finally:
        ended.set()
        stalling.join()
    wait_until(lambda: not prometheus.firing(), TIMEOUT_S, told)


@pytest.mark.long
@pytest.mark.skipif(not os.access(QUOTAS, os.W_OK), reason="no cgroup for CPU quotas here")
def test_an_alert_of_a_quota_fires_and_clears(corral: Corral, prometheus: Prometheus) -> None:
    (engine,) = processes.tagged(corral.directory, "serve_app.run.local.engine")
    group = QUOTAS / f"corral-{engine}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("10000")  # of a period of 100 ms
        (group / "cgroup.procs").write_text(str(engine))
        with asking(corral, 2, 1000):
            wait_until(
                lambda: "CorralCPUThrottled" in prometheus.firing(),
                2 * TIMEOUT_S,
                lambda: str(prometheus.samples("ray_corral_cpu_throttled_seconds_total")),
            )
            (group / "cpu.cfs_quota_us").write_text("-1")
        wait_until(lambda: not prometheus.firing(), 2 * TIMEOUT_S, lambda: str(prometheus.firing()))
    finally:
        (QUOTAS / "cgroup.procs").write_text(str(engine))
        group.rmdir()
