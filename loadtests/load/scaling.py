"""A burst on the cluster of `make cluster-up`: load, replicas, nodes and latency over time.

Starts that cluster on ports of its own, loads it, and stops it. Prints the table; --plot writes it as a
picture, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from cluster.local.cluster import LocalCluster
from loadtests.common import benchmark
from loadtests.common.benchmark import percentile
from loadtests.common.plot import Chart, svg
from loadtests.common.servers import exit_on_sigterm, free_port
from loadtests.load.driver import Load, Result, drive
from loadtests.load.stream_metrics import ABORTED, COMPLETE
from loadtests.load.target import Target
from loadtests.load.users.mixes import checked_mix
from loadtests.load.users.shapes import users_at

EVERY_S = 10
SHAPE = "burst"


@dataclass(frozen=True, slots=True)
class Row:
    """EVERY_S seconds of a run."""

    at_s: int
    users: int
    """At the end of them, as are the next three."""
    replicas: int
    nodes: int
    waiting: int
    """Requests without a slot."""
    sent: int
    failed: int
    """Of the requests sent in these seconds, those that did not end complete, but for users who left."""
    ttft_p50_s: float | None
    """Of the requests sent in these seconds, as the next."""
    ttft_p95_s: float | None


def rows(result: Result, nodes: Sequence[tuple[float, int]], start_s: float) -> list[Row]:
    """The rows of a run's samples and requests, EVERY_S seconds in each. `nodes` are (time, worker nodes),
    `start_s` is when the run began, both since the epoch."""
    load, found = result.load, list[Row]()
    for at_s in range(0, load.run_s, EVERY_S):
        end_s = at_s + EVERY_S
        samples = [one for one in result.samples if at_s <= one.at_s < end_s]
        counts = [count for moment, count in nodes if moment - start_s < end_s]
        sent = [o for o in result.outcomes if at_s <= o.start_s - start_s < end_s]
        ttft_s = [o.ttft_s for o in sent if o.ttft_s is not None]
        found.append(
            Row(
                at_s=at_s,
                users=users_at(load.shape, end_s - 1, load.users, load.run_s),
                replicas=samples[-1].replicas if samples else 0,
                nodes=counts[-1] if counts else 0,
                waiting=samples[-1].waiting if samples else 0,
                sent=len(sent),
                failed=sum(o.end not in (COMPLETE, ABORTED) for o in sent),
                ttft_p50_s=percentile(ttft_s, 50) if ttft_s else None,
                ttft_p95_s=percentile(ttft_s, 95) if ttft_s else None,
            )
        )
    return found


def table(found: Sequence[Row]) -> str:
    """Markdown."""
    header = (
        "from, s",
        "users",
        "replicas",
        "nodes",
        "waiting",
        "sent",
        "failed",
        "TTFT p50, s",
        "p95",
    )
    rows = []
    for row in found:
        counts = (row.at_s, row.users, row.replicas, row.nodes, row.waiting, row.sent, row.failed)
        times = ("" if t is None else f"{t:.2f}" for t in (row.ttft_p50_s, row.ttft_p95_s))
        rows.append((*counts, *times))
    return benchmark.table(header, rows)


def plot(found: Sequence[Row]) -> str:
    """The same as SVG."""
    places = [str(row.at_s) if row.at_s % 60 == 0 else "" for row in found]
    charts = [
        Chart(
            "load",
            places,
            {"users": [r.users for r in found], "waiting": [r.waiting for r in found]},
        ),
        Chart(
            "size",
            places,
            {"replicas": [r.replicas for r in found], "nodes": [r.nodes for r in found]},
        ),
        Chart(
            "time to first token, s",
            places,
            {"p50": [r.ttft_p50_s for r in found], "p95": [r.ttft_p95_s for r in found]},
        ),
    ]
    return svg("A burst, and rest", "seconds", charts)


@contextmanager
def _nodes_observed(cluster: LocalCluster) -> Iterator[list[tuple[float, int]]]:
    """Meanwhile, (time, worker nodes) once a second."""
    seen, enough = list[tuple[float, int]](), threading.Event()

    def observe() -> None:
        while not enough.wait(1):
            with suppress(httpx.HTTPError):
                seen.append((time.time(), cluster.worker_nodes()))

    observer = threading.Thread(target=observe)
    observer.start()
    try:
        yield seen
    finally:
        enough.set()
        observer.join()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.load.scaling", description=__doc__)
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--mix", type=checked_mix, default="chat=1")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    load = Load(args.users, args.seconds, args.mix, think_s=1.0, shape=SHAPE)
    with tempfile.TemporaryDirectory(prefix="corral-", dir="/tmp") as folder:
        cluster = LocalCluster(Path(folder, "c"), free_port(), free_port(), free_port())
        cluster.up()
        try:
            with _nodes_observed(cluster) as nodes:
                start_s = time.time()
                result = drive(Target(cluster.url), load)
        finally:
            cluster.down()
    found = rows(result, nodes, start_s)
    if args.plot is not None:
        args.plot.write_text(plot(found))
    print(table(found))
    print(result.accounts, file=sys.stderr)


if __name__ == "__main__":
    exit_on_sigterm()
    main()
