"""`corral serve` with the built-in model, and the commands that ask it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import yaml

from loadtests.common import processes, servers
from loadtests.common.processes import with_default_signals
from tests.e2e.conftest import SETTINGS, START_TIMEOUT_S, short_folder, wait_until

RAY_TELLS_S = 60
"""Seconds in which Ray's agent of a node tries to tell a head that is gone that the raylet is gone, too."""
EXPORT_TIMEOUT_S = 60
CORRAL = [sys.executable, "-P", "-m", "serve_app.cli"]


def corral(*arguments: str) -> str:
    """What a command prints."""
    done = subprocess.run([*CORRAL, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Started:
    """A `corral serve`, in a folder of its own."""

    def __init__(self, folder: Path, *arguments: str, command: Sequence[str] = CORRAL) -> None:
        self.folder = folder
        self.port = servers.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        environment = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder)}
        served = [*command, "serve", "--port", str(self.port), *arguments]
        self.process = servers.start(served, folder, SETTINGS | environment)

    @property
    def said(self) -> str:
        return (self.folder / servers.LOG).read_text(errors="replace")

    @property
    def log(self) -> Path:
        """What the server's processes have printed."""
        return self.folder / "corral/logs" / f"server-{self.port}.log"

    def wait_for(self, text: str) -> None:
        """Until it says so."""
        wait_until(
            lambda: text in self.said or self.process.poll() is not None,
            START_TIMEOUT_S,
            lambda: f"{text} in\n{self.said}",
        )
        assert text in self.said

    def wait_for_keeper(self) -> int:
        """Until the program that starts Ray has become another: its process id."""
        name = "serve_app.cluster.keeper"
        wait_until(
            lambda: bool(processes.tagged(self.folder, name)), START_TIMEOUT_S, lambda: self.said
        )
        (keeper,) = processes.tagged(self.folder, name)
        return keeper


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with short_folder() as directory:
        yield directory


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder for one test: its processes are known by the folder."""
    with short_folder() as directory:
        yield directory


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Started]:
    started = Started(folder, "--slots", "4")
    try:
        started.wait_for("Ctrl-C stops it.")
        yield started
    finally:
        processes.stop(started.process, folder, servers.STOP_TIMEOUT_S)


def test_the_start_is_said_in_a_few_lines(server: Started) -> None:
    lines = server.said.splitlines()
    assert f"{server.url} answers; models are still loading." in lines
    summary = lines[next(i for i, line in enumerate(lines) if line.startswith("Address")) :]
    assert [line.partition(" ")[0] for line in summary if not line.startswith(" ")] == [
        *("Address", "Page", "Model", "Logs", "Ctrl-C")
    ]
    assert summary[0] == f"Address   {server.url}/v1"
    assert summary[1].startswith("          Only for this machine.")
    assert "corral-demo: 4 slots that share 8,192 tokens" in summary[3]
    assert len(lines) < 24
    assert "corral.replica" not in server.said
    assert "corral.replica" in server.log.read_text()
    assert not processes.tagged(server.folder, "raylet")


def test_chat_ps_stats_and_top(server: Started) -> None:
    answer = corral("chat", "Hi", "--max-tokens", "8", "--temperature", "0", "--url", server.url)
    assert answer.strip()
    assert "corral-demo" in corral("ps", "--url", server.url)
    view = json.loads(corral("stats", "--json", "--url", server.url))
    (replica,) = view["replicas"].values()
    assert (replica["n_slots"], replica["n_ctx_slot"], replica["state"]) == (4, 2048, "up")
    assert "...." in corral("top", "--frames", "1", "--url", server.url)


def test_metrics_are_where_prometheus_is_told(server: Started) -> None:
    file = server.folder / f"corral/prometheus/server-{server.port}.json"
    ((target,),) = [one["targets"] for one in json.loads(file.read_text())]

    def exported() -> str:
        return httpx.get(f"http://{target}/metrics", timeout=10, verify=False).text

    wait_until(lambda: "ray_corral_slots_busy" in exported(), EXPORT_TIMEOUT_S, exported)


def test_ctrl_c_ends_every_process(server: Started) -> None:
    assert processes.tagged(server.folder, "serve_app.run.local.engine")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(servers.STOP_TIMEOUT_S) == 0
    wait_until(
        lambda: not processes.tagged(server.folder, ""),
        servers.STOP_TIMEOUT_S,
        lambda: str(processes.tagged(server.folder, "")),
    )
    assert not [*(server.folder / "corral/prometheus").iterdir()]


@pytest.mark.long
def test_a_server_that_is_killed_leaves_nothing_behind(folder: Path) -> None:
    started = Started(folder)
    try:
        started.wait_for("Starting the server")
        os.kill(started.process.pid, signal.SIGKILL)
        wait_until(
            lambda: not processes.tagged(folder, ""),
            servers.STOP_TIMEOUT_S,
            lambda: str(processes.tagged(folder, "")),
        )
    finally:
        processes.stop(started.process, folder, servers.STOP_TIMEOUT_S)


@pytest.mark.long
def test_a_cluster_of_one_machine_has_what_it_needs_and_ends_with_ray(own_folder: Path) -> None:
    started = Started(own_folder, "--slots", "2", "--cluster")
    try:
        started.wait_for("Ctrl-C stops it.")
        for program in (
            "dashboard/dashboard.py",
            "autoscaler/v2/monitor.py",
            "_private/monitor.py",
            "log_monitor.py",
        ):
            assert not processes.tagged(own_folder, program)
        for proxy in ("haproxy", "ray::HAProxyManager", "ray::ProxyActor"):
            assert not processes.tagged(own_folder, proxy)
        assert "(Ray's own)" in started.said
        keeper = started.wait_for_keeper()
        lines = started.log.read_text().splitlines()
        assert any(line.startswith("(ServeReplica:corral:Ingress pid=") for line in lines)
        assert sum("Adding 1 replica" in line for line in lines) == 2  # each line once
        os.kill(keeper, signal.SIGKILL)
        wait_until(
            lambda: not processes.tagged(own_folder, ""),
            servers.STOP_TIMEOUT_S + RAY_TELLS_S,
            lambda: str([processes.command_line(one) for one in processes.tagged(own_folder, "")]),
        )
        assert "The server has ended." in started.said
    finally:
        processes.stop(started.process, own_folder, servers.STOP_TIMEOUT_S)


@pytest.mark.long
def test_a_server_whose_raylet_is_gone_says_so_and_ends(own_folder: Path) -> None:
    started = Started(own_folder, "--slots", "2", "--cluster")
    try:
        started.wait_for("Ctrl-C stops it.")
        keeper = started.wait_for_keeper()
        os.kill(keeper, signal.SIGSTOP)
        assert not processes.within(1.0, lambda: started.process.poll() is not None)
        os.kill(keeper, signal.SIGCONT)  # it looks on
        assert not processes.within(1.0, lambda: "Shutting down" in started.log.read_text())
        assert httpx.get(f"{started.url}/health").status_code == 200
        (raylet,) = processes.tagged(own_folder, "raylet/raylet")
        os.kill(raylet, signal.SIGKILL)
        assert started.process.wait(servers.STOP_TIMEOUT_S) == 1
        assert "Ray's raylet has ended." in started.said
    finally:
        processes.stop(started.process, own_folder, servers.STOP_TIMEOUT_S)


@pytest.mark.long
def test_a_file_with_several_replicas_has_ray(own_folder: Path) -> None:
    config = own_folder / "two.yaml"
    said = corral("config", "--port", str(servers.free_port()), "--slots", "2", "--threads", "1")
    content = yaml.safe_load(said)
    deployment = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}
    content["applications"][0]["args"]["models"][0]["serve"] = deployment
    config.write_text(yaml.safe_dump(content))
    environment = {"XDG_RUNTIME_DIR": str(own_folder), "XDG_CACHE_HOME": str(own_folder)}
    command = [*CORRAL, "serve", "--config", str(config)]
    process = servers.start(command, own_folder, SETTINGS | environment)
    try:
        wait_until(
            lambda: "(Ray's own)" in (own_folder / servers.LOG).read_text(),
            START_TIMEOUT_S,
            lambda: (own_folder / servers.LOG).read_text(),
        )
        assert processes.tagged(own_folder, "raylet")
    finally:
        processes.stop(process, own_folder, servers.STOP_TIMEOUT_S)


@pytest.mark.long
def test_a_file_with_settings_of_serve_is_deployed_by_serve(folder: Path) -> None:
    config = folder / "logging.yaml"
    port = servers.free_port()
    said = corral("config", "--port", str(port), "--slots", "2")
    config.write_text(f"{said}\nlogging_config: {{encoding: JSON}}\n")
    command = [*CORRAL, "serve", "--config", str(config)]
    environment = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    process = servers.start(command, folder, SETTINGS | environment)
    log = folder / "corral/logs" / f"server-{port}.log"
    try:
        wait_until(
            lambda: "Ctrl-C stops it." in (folder / servers.LOG).read_text(),
            START_TIMEOUT_S,
            lambda: (folder / servers.LOG).read_text(),
        )
        assert "Importing and building app" in log.read_text()
    finally:
        processes.stop(process, folder, servers.STOP_TIMEOUT_S)


@pytest.mark.long
def test_a_configuration_that_cannot_work_ends_with_one_line(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text(corral("config", "--threads", "4096"))
    command = with_default_signals(*CORRAL, "serve", "--config", str(config))
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 1
    assert "models (corral-demo): engine.threads: 4096 threads on " in done.stdout
    assert "Deploying app" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
