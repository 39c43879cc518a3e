"""`corral batch` over two Ray nodes, which are two raylets of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

N_LINES, PER_PART = 240, 4
ENGINE = b"MapWorker(MapBatches(Answerer"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Each node has room for one engine."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()  # type: ignore[no-untyped-call]


def raylets_of_engines() -> set[int]:
    """The parents of this machine's processes that answer."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if ENGINE in (process / "cmdline").read_bytes():
                found.add(int((process / "stat").read_text().rpartition(")")[2].split()[1]))
        except (OSError, ValueError):
            continue  # it has just ended
    return found


@pytest.mark.long
def test_engines_on_two_nodes_answer_each_line_once_and_in_order(
    cluster: Cluster, tmp_path: Path
) -> None:
    rows = [{"n": n, "text": f"What is {n} plus 1?"} for n in range(N_LINES)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fields = json.dumps({"max_tokens": 24, "temperature": 0})
    sizes = ["--slots", "2", "--context", "256", "--lines-per-part", str(PER_PART)]
    threads = ["--threads", "1", "--replicas", "2", "--column", "text", "--fields", fields]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "serve_app.plugins.batch"),
            *(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *sizes, *threads),
        ],
        env=os.environ | {"RAY_ADDRESS": cluster.address, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    seen = set[int]()
    deadline = time.monotonic() + 300
    try:
        while process.poll() is None and time.monotonic() < deadline:
            seen |= raylets_of_engines()
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait(20)
    assert process.returncode == 0
    assert len(seen) == 2, "an engine on each node"
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["n"] for row in found] == list(range(N_LINES))
    assert all(row["answer"] for row in found)
