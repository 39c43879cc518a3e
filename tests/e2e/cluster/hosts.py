"""Several hosts on one machine: network namespaces, with a switch between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.common.processes import send, tagged, with_default_signals
from tests.e2e.cluster.cable import CARRIES
from tests.e2e.conftest import ROOT, short_folder, wait_until

# Of the networks that are reserved for tests (RFC 2544).
_NETWORK = "198.18.0"
_TESTS, _TO_TESTS = "198.18.1.1", "198.18.1.2"
"""This machine as the head sees it, and the head from here."""
_PORT, _RAY_PORT = 8000, 6400
_BIN = Path(sys.executable).parent
_RATE = "root tbf rate 1gbit burst 256kb latency 50ms"
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="namespaces need root and iproute2"
)


class Hosts:
    """A Ray cluster of hosts, of which 0 is the head, and Corral on it. Cables have 1 Gbit/s."""

    url = f"http://{_TO_TESTS}:{_PORT}"

    def __init__(self, directory: Path, n_hosts: int) -> None:
        self.directory = directory
        self._hosts = [f"corral-{os.getpid()}-{i}" for i in range(n_hosts)]
        self._switch = f"corral-{os.getpid()}-switch"
        self._to_tests = f"c{os.getpid()}t"
        self._running = ExitStack()

    def start(self, n_cpus: int, delay_s: float) -> None:
        """Make the network, and start Ray on all hosts. The head has a `door`, where ingresses are. What a
        host sends to others takes `delay_s` more."""
        for space in (self._switch, *self._hosts):
            _ip(f"netns add {space}")
            _ip(f"-n {space} link set lo up")
        _ip(f"-n {self._switch} link add switch type bridge")
        _ip(f"-n {self._switch} link set switch up")
        for i, host in enumerate(self._hosts):
            if delay_s:
                words = ("tests.e2e.cluster.cable", "cable", f"port{i}", str(delay_s))
                log = self._run_on(i, sys.executable, "-m", *words)
                wait_until(lambda log=log: CARRIES in log.read_text(), 20, log.read_text)  # type: ignore[misc]
                _ip(f"-n {host} link set port{i} netns {self._switch}")
            else:
                _ip(f"-n {host} link add cable type veth peer name port{i} netns {self._switch}")
            _ip(f"-n {self._switch} link set port{i} master switch up")
            _ip(f"-n {host} addr add {_address(i)}/24 dev cable")
            _ip(f"-n {host} link set cable up")
            for space, link in ((host, "cable"), (self._switch, f"port{i}")):
                _run("ip", "netns", "exec", space, "tc", *f"qdisc add dev {link} {_RATE}".split())
        _ip(f"-n {self._hosts[0]} link add tests type veth peer name {self._to_tests} netns 1")
        _ip(f"-n {self._hosts[0]} addr add {_TO_TESTS}/24 dev tests")
        _ip(f"-n {self._hosts[0]} link set tests up")
        _ip(f"addr add {_TESTS}/24 dev {self._to_tests}")
        _ip(f"link set {self._to_tests} up")
        for i in range(len(self._hosts)):
            head = ["--head", f"--port={_RAY_PORT}", '--resources={"door":1}']
            role = [f"--address={_address(0)}:{_RAY_PORT}"] if i else head
            start = [str(_BIN / "ray"), "start", "--block", f"--num-cpus={n_cpus}"]
            log = self._run_on(i, *start, *role, f"--node-ip-address={_address(i)}")
            wait_until(partial(_has_started, log), 60, log.read_text)

    def serve(self, models: Sequence[dict[str, Any]]) -> Path:
        """Serve these models, with an ingress on the head; returns its log."""
        door = {"num_replicas": 1, "ray_actor_options": {"resources": {"door": 0.1}}}
        application = {
            "name": "corral",
            "route_prefix": "/",
            "import_path": "serve_app.app:build",
            "args": {"models": models, "ingress": {"allow_anonymous": True, "serve": door}},
        }
        http = {"proxy_location": "HeadOnly", "http_options": {"host": "0.0.0.0", "port": _PORT}}
        path = self.directory / "serve_config.yaml"
        path.write_text(json.dumps(http | {"applications": [application]}))  # is YAML
        address = f"RAY_ADDRESS={_address(0)}:{_RAY_PORT}"
        return self._run_on(0, "env", address, str(_BIN / "serve"), "run", str(path))

    def cut(self, host: int) -> None:
        """Cut the cable of a host."""
        _ip(f"-n {self._hosts[host]} link set cable down")

    def replicas(self, model_id: str) -> list[dict[str, Any]]:
        """What each replica of a model tells; nothing until the ingress answers."""
        with suppress(httpx.TransportError, KeyError, ValueError):
            models = httpx.get(f"{self.url}/v1/stats", timeout=5).json()["models"]
            return [one for model in models if model["id"] == model_id for one in model["replicas"]]
        return []

    def pids(self, name: str) -> list[int]:
        """The processes of all hosts whose command lines hold `name`."""
        return tagged(self.directory, name)

    def _run_on(self, host: int, *command: str) -> Path:
        return self._running.enter_context(self._process(self._hosts[host], *command))

    @contextmanager
    def _process(self, host: str, *command: str) -> Iterator[Path]:
        """A process on a host; gives its log."""
        log = self.directory / f"log-{len(list(self.directory.glob('log-*')))}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                with_default_signals("ip", "netns", "exec", host, *command),
                cwd=ROOT,
                env=os.environ
                | {
                    "RAY_AUTH_MODE": "token",
                    "RAY_TMPDIR": str(self.directory),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_worker_niceness": "0",
                    "XDG_RUNTIME_DIR": str(self.directory),
                    # A host counts as lost after five looks without an answer.
                    "RAY_health_check_period_ms": "1000",
                    "RAY_health_check_timeout_ms": "2000",
                },
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield log
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # Ray waits for hosts that it cannot reach
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)

    def stop(self) -> None:
        """End what is left, and remove the hosts. The link first: a host that has lost its name lives on,
        and this machine's route to it, while its kernel sends again what was lost in the cut."""
        try:
            self._running.close()
        finally:
            send(self.directory, signal.SIGKILL)
            subprocess.run(["ip", "link", "del", self._to_tests], check=False)
            for space in (self._switch, *self._hosts):
                subprocess.run(["ip", "netns", "del", space], check=False)


@contextmanager
def hosts(n_hosts: int, n_cpus: int, delay_s: float = 0.0) -> Iterator[Hosts]:
    """Hosts that run Ray, until the end of the block. What one sends to others takes `delay_s` more."""
    with short_folder() as directory:
        cluster = Hosts(directory, n_hosts)
        try:
            cluster.start(n_cpus, delay_s)
            yield cluster
        finally:
            cluster.stop()


def _has_started(log: Path) -> bool:
    return "Ray runtime started" in log.read_text()


def _address(host: int) -> str:
    return f"{_NETWORK}.{host + 1}"


def _ip(arguments: str) -> None:
    _run("ip", *arguments.split())


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
