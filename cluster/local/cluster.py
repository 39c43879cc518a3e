"""`make cluster-up` and `make cluster-down`: an autoscaled cluster of several nodes on this machine.

Ray's own autoscaler adds and removes nodes (`autoscaler.yaml`), each a raylet of its own, and Corral is
deployed to them as to any cluster (`serve_config.yaml`). All that it starts has the cluster's folder in its
environment: that is how it is found again, and nothing else is ever stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import yaml

from loadtests.common.processes import run_tool, send, tagged, within

HERE = Path(__file__).parent
DEPLOY_TIMEOUT_S = 180
GRACE_S = 5
STOP_TIMEOUT_S = 30


class ClusterError(Exception):
    """The cluster could not be started."""


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """One cluster. `folder` has its files, and its path must be short: Ray puts sockets in. The ports are
    of loopback: Ray's, the dashboard's, and the one that Corral serves."""

    folder: Path = Path(f"/tmp/corral-cluster-{os.getuid()}")
    ray_port: int = 6379
    dashboard_port: int = 8265
    http_port: int = 8000

    @property
    def url(self) -> str:
        """Where Corral answers."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def token(self) -> Path:
        """The file with the secret that Ray asks everybody for."""
        return self.folder / "token"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of the cluster."""
        elsewhere = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")  # of another cluster
        return {key: value for key, value in os.environ.items() if key not in elsewhere} | {
            "RAY_TMPDIR": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.folder),  # core leases of its own
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_FAKE_CLUSTER": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
        }

    def up(self) -> None:
        """Start Ray's head, deploy Corral, and wait until it answers. Raises ClusterError; then nothing is
        left running."""
        if tagged(self.folder):
            raise ClusterError("The cluster is up already; `make cluster-down` stops it.")
        for port in (self.ray_port, self.dashboard_port, self.http_port):
            _require_free(port)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o700)
        self.token.write_text(secrets.token_hex(32))
        try:
            self._start_head()
            self._deploy()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Stop every process that the cluster started; logs stay. Raises ClusterError if one is left."""
        for signum, timeout_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
            send(self.folder, signum)
            if within(timeout_s, lambda: not tagged(self.folder)):
                return
        raise ClusterError(f"Still running: {tagged(self.folder)}")

    def worker_nodes(self) -> int:
        """How many nodes there are besides the head, as Ray says. Raises httpx2.HTTPError."""
        token = {"Authorization": f"Bearer {self.token.read_text()}"}
        answer = httpx2.get(f"{self._dashboard}/api/v0/nodes", headers=token, timeout=10)
        nodes = answer.raise_for_status().json()["data"]["result"]["result"]
        return sum(node["state"] == "ALIVE" and not node["is_head_node"] for node in nodes)

    @property
    def _dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def _start_head(self) -> None:
        config = yaml.safe_load((HERE / "autoscaler.yaml").read_text())
        config["provider"]["gcs_address"] = f"127.0.0.1:{self.ray_port}"
        file = self.folder / "autoscaler.yaml"
        file.write_text(json.dumps(config))  # is YAML
        ports = {
            "port": self.ray_port,
            "dashboard-port": self.dashboard_port,
            "dashboard-agent-listen-port": 0,  # any
        }
        self._run(
            "ray",
            *("start", "--head", "--num-cpus=0", "--object-store-memory=100000000"),
            *("--node-ip-address=127.0.0.1", f"--autoscaling-config={file}"),
            *(f"--{name}={port}" for name, port in ports.items()),
        )

    def _deploy(self) -> None:
        config = yaml.safe_load((HERE / "serve_config.yaml").read_text())
        config["http_options"]["port"] = self.http_port
        file = self.folder / "serve_config.yaml"
        file.write_text(json.dumps(config))
        self._run("serve", "deploy", "--address", self._dashboard, file)
        if not within(DEPLOY_TIMEOUT_S, lambda: _answers(self.url)):
            raise ClusterError(f"Corral does not answer. Logs are in {self.folder}.")

    def _run(self, *command: str | Path) -> None:
        """A tool of this Python's environment; what it prints goes to a file."""
        tool = command[0]
        log = self.folder / f"{tool}.log"
        if run_tool(command, log, self.environment):
            raise ClusterError(f"`{tool}` failed:\n{log.read_text(errors='replace')}")


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ClusterError(
                f"Port {port} is in use: another Ray cluster or server runs here. Choose others: "
                "`make cluster-up PORT=8001 RAY_PORT=6380 DASHBOARD_PORT=8266`."
            )


def _answers(url: str) -> bool:
    """Whether Corral serves there, and an engine of every model answers."""
    with suppress(httpx2.HTTPError, KeyError, ValueError):
        stats = httpx2.get(f"{url}/v1/stats", timeout=10)
        return stats.is_success and all(model["replicas"] for model in stats.json()["models"])
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m cluster.local.cluster")
    parser.add_argument("action", choices=("up", "down"))
    for name, port in (("port", 8000), ("ray-port", 6379), ("dashboard-port", 8265)):
        parser.add_argument(f"--{name}", type=int, default=port)
    args = parser.parse_args()
    cluster = LocalCluster(
        ray_port=args.ray_port, dashboard_port=args.dashboard_port, http_port=args.port
    )
    try:
        if args.action == "down":
            cluster.down()
            print("The cluster is down.")
            return
        cluster.up()
    except ClusterError as error:
        sys.exit(str(error))
    print(
        f"Corral serves at {cluster.url}. Ray's dashboard: http://127.0.0.1:{cluster.dashboard_port}"
    )
    print(f"For `ray status`: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={cluster.token}")


if __name__ == "__main__":
    main()
