"""What an idle server takes: names of processes, and shares of a core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.common.processes import TAG, rollup_kib
from loadtests.load.idle import measured, percentages, short_name


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::ServeReplica:corral:Ingress  ", "ray::ServeReplica:corral:Ingress"),
        ("ray-dashboard-NodeHead-0 (/usr/bin/python3 -B -c", "ray-dashboard-NodeHead"),
        ("/usr/bin/python3 -u /x/ray/_private/log_monitor.py --logs-dir=/tmp/l.py", "log_monitor"),
        (
            "/usr/bin/python -m serve_app.server.workers.worker 65 ",
            "serve_app.server.workers.worker",
        ),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/x", "gcs_server"),
        ("/x/raylet/raylet --python_worker_command=/usr/bin/python /x/setup_worker.py", "raylet"),
        ("/x/bin/python3 /x/bin/serve run serve_config.yaml", "serve"),
        ("/x/bin/haproxy -db -f /tmp/haproxy.cfg -sf 12", "haproxy"),
        ("", "?"),
    ],
)
def test_names(command: str, name: str) -> None:
    assert short_name(command) == name


def test_shares_are_of_one_core_and_of_those_who_stayed() -> None:
    before = {1: 10.0, 2: 0.5, 3: 7.0}
    after = {1: 10.5, 2: 1.5, 4: 9.0}
    shares = percentages(before, after, 50)
    assert list(shares) == [2, 1]  # most first
    assert shares == {2: pytest.approx(2.0), 1: pytest.approx(1.0)}


def test_memory_that_nobody_shares_counts_whole() -> None:
    program = "block = bytearray(b'x' * 2**26); print(flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = rollup_kib(process.pid, "Pss:") / 2**10
        process.communicate(b"\n")
    assert 64 < memory < 160


def test_a_server_is_measured_by_its_directory(tmp_path: Path) -> None:
    """Nobody has that one as a tag, and this process has another."""
    assert os.environ.get(TAG) != str(tmp_path)
    assert measured(tmp_path, 0.01) == {}
