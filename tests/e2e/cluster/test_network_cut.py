"""Two hosts, network namespaces of this machine, and the network between them is cut in mid-stream."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from loadtests.common.processes import send, with_default_signals
from tests.e2e.cluster.test_failover import EXACT, Streams
from tests.e2e.conftest import ROOT, model, short_folder, wait_until

# Of the networks that are reserved for tests (RFC 2544).
HEAD, OTHER = "198.18.0.1", "198.18.0.2"
TESTS, TO_TESTS = "198.18.1.1", "198.18.1.2"
"""This machine as the head sees it, and the head from here."""
PORT = 8000
BIN = Path(sys.executable).parent
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="namespaces need root and iproute2"
    ),
]


class Hosts:
    """A head and another host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.head, self.other = f"corral-{os.getpid()}-a", f"corral-{os.getpid()}-b"
        self._links = [f"c{os.getpid()}{end}" for end in "abcd"]

    def join(self) -> None:
        """Make the hosts, a network between them, and another one between the head and the tests."""
        a, b, c, d = self._links
        for host in (self.head, self.other):
            _ip(f"netns add {host}")
            _ip(f"-n {host} link set lo up")
        _ip(f"link add {a} netns {self.head} type veth peer name {b} netns {self.other}")
        _ip(f"link add {c} netns {self.head} type veth peer name {d}")
        for host, link, address in (
            (self.head, a, HEAD),
            (self.other, b, OTHER),
            (self.head, c, TO_TESTS),
        ):
            _ip(f"-n {host} addr add {address}/24 dev {link}")
            _ip(f"-n {host} link set {link} up")
        _ip(f"addr add {TESTS}/24 dev {d}")
        _ip(f"link set {d} up")

    def cut(self) -> None:
        """Cut the network between them."""
        _ip(f"-n {self.head} link set {self._links[0]} down")

    @contextmanager
    def running(self, host: str, *command: str) -> Iterator[Path]:
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

    def leave(self) -> None:
        """End what is left, and remove the hosts. The link first: a host that has lost its name lives on,
        and this machine's route to it, while its kernel sends again what was lost in the cut."""
        send(self.directory, signal.SIGKILL)
        subprocess.run(["ip", "link", "del", self._links[-1]], check=False)
        for host in (self.head, self.other):
            subprocess.run(["ip", "netns", "del", host], check=False)


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


class Served:
    """Corral on these hosts, as `Streams` sees it."""

    url = f"http://{TO_TESTS}:{PORT}"

    def nodes(self) -> set[str]:
        """Those that have a replica; none until it answers."""
        with suppress(httpx.TransportError, KeyError, ValueError):
            (found,) = httpx.get(f"{self.url}/v1/stats", timeout=5).json()["models"]
            return {replica["node_id"] for replica in found["replicas"]}
        return set()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with short_folder() as directory:
        hosts = Hosts(directory)
        try:
            hosts.join()
            yield hosts
        finally:
            hosts.leave()


def config(directory: Path, gguf: Path) -> Path:
    """A replica on each host, the ingress on the head."""
    served = model(gguf, "m", n_slots=4, n_ctx_slot=2048, **EXACT)
    served["deployment"] = {
        "num_replicas": 2,
        "max_replicas_per_node": 1,
        "ray_actor_options": {"num_cpus": 1},
    }
    door = {"num_replicas": 1, "ray_actor_options": {"resources": {"door": 0.1}}}
    application = {
        "name": "corral",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": {"models": [served], "ingress": {"allow_anonymous": True, "deployment": door}},
    }
    http = {"proxy_location": "HeadOnly", "http_options": {"host": "0.0.0.0", "port": PORT}}
    path = directory / "serve_config.yaml"
    path.write_text(json.dumps(http | {"applications": [application]}))  # is YAML
    return path


def test_streams_outlive_a_network_cut(hosts: Hosts, gguf: Path) -> None:
    ray, address = str(BIN / "ray"), f"{HEAD}:6400"
    start = [ray, "start", "--block", "--num-cpus=1"]
    at_head = [*start, "--head", f"--node-ip-address={HEAD}", "--port=6400"]
    serve = ["env", f"RAY_ADDRESS={address}", str(BIN / "serve"), "run"]
    served = Served()
    with ExitStack() as stack:

        def run(host: str, *command: str) -> Path:
            return stack.enter_context(hosts.running(host, *command))

        def joined(log: Path) -> None:
            wait_until(lambda: "Ray runtime started" in log.read_text(), 60, log.read_text)

        joined(run(hosts.head, *at_head, '--resources={"door":1}'))
        joined(run(hosts.other, *start, f"--address={address}", f"--node-ip-address={OTHER}"))
        log = run(hosts.head, *serve, str(config(hosts.directory, gguf)))
        wait_until(lambda: len(served.nodes()) == 2, 90, log.read_text)
        streams = Streams(served, 8, 1500)
        with ThreadPoolExecutor(8) as pool:
            alone = list(pool.map(streams.alone, streams.numbers))
            reading = [pool.submit(streams.read, number) for number in streams.numbers]
            wait_until(lambda: streams.n_begun == 8, 60, "eight streams")
            hosts.cut()
            for one in reading:
                one.result(180)
        assert streams.texts == alone
        assert "continues on another replica" in log.read_text()
