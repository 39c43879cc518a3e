"""Ways to route requests to replicas, simulated; and how long Corral's way takes, measured.

    python -m loadtests.routing [--replicas 64] [--slots 16] [--clients 640] [--requests 10000]
        [--prefixes 500,1000] [--zipf 1.0,0.8] [--routers 4] [--json FILE]

The replicas, the clients and the time are simulated (`replica`, `simulation`): half of
the replicas compute at the speed of a measured machine with a 0.6B model, a quarter at half of it, a
quarter at a third. The decision is not simulated: it is the code that Ray Serve runs, with reports
that are up to 1.3 seconds old and several routers that do not know of each other. Every client sends its
next request when the last one was answered. A prompt is one of --prefixes common beginnings of 1,024
tokens, drawn by Zipf's law with that exponent, and 128 tokens of its own.

Hits are prompt tokens that were found in a cache. The longest backlog of a replica is given in seconds of
work, and over the average one at that time (imbalance).

The decision is timed on this machine, in CPU time: 64 replicas that hold as much as they may report, and
prompts of 4,096 tokens.
Progress goes to stderr, Markdown tables to stdout, and the figures to the JSON file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from loadtests.common import benchmark
from loadtests.common.benchmark import bounded, cpu_name, listed, percentile
from loadtests.routing.replica import Workload
from loadtests.routing.simulation import Policy, PrefixAware, RoundRobin, Simulation, TwoChoices
from serve_app.routing.blocks import MAX_BLOCKS, chain
from serve_app.routing.score import Fleet, Report, RoutedPrompt

_POLICIES: dict[str, type[RoundRobin | TwoChoices | PrefixAware]] = {
    "round robin": RoundRobin,
    "Serve's default": TwoChoices,
    "Corral": PrefixAware,
}
_HEADER = (
    "prefixes",
    "Zipf",
    "router",
    "hits",
    "tokens/s",
    "TTFT p50, s",
    "p95",
    "p99",
    "backlog, s",
    "imbalance",
)


def simulated(workload: Workload, name: str) -> dict[str, Any]:
    """One policy's figures."""
    print(f"{name}, {workload.prefixes} prefixes ...", file=sys.stderr, flush=True)
    policy: type[Policy] = _POLICIES[name]
    simulation = Simulation(workload, policy)
    simulation.run()
    answered = simulation.answered
    ttft = [one.first_s - one.sent_s for one in answered]
    return {
        "workload": asdict(workload),
        "router": name,
        "answered": len(answered),
        "hits": sum(one.n_cached for one in answered)
        / sum(one.prompt.n_tokens for one in answered),
        "tps": sum(one.n_done for one in answered) / max(one.ended_s for one in answered),
        **{f"ttft_p{p}_s": percentile(ttft, p) for p in (50, 95, 99)},
        "backlog_s": simulation.worst_backlog_s,
        "imbalance": simulation.worst_imbalance,
    }


def decision_s(n_replicas: int = 64, n_tokens: int = 4096, n_times: int = 2000) -> list[float]:
    """Seconds of single decisions: the prompt's hashes, the choice and the booking."""
    rng = random.Random(20)
    held = chain([rng.randrange(150_000) for _ in range(32 * (MAX_BLOCKS - n_tokens // 32))])
    common = [rng.randrange(150_000) for _ in range(n_tokens)]
    fleet = Fleet[int](rng)
    report = Report(n_slots=16, n_live=12, work_s=9.0, blocks=frozenset(held + chain(common)))
    fleet.update(range(n_replicas))
    for replica in range(n_replicas):
        fleet.hear(replica, report, 0.0)
    taken = []
    for key in range(n_times):
        n_same = rng.randrange(n_tokens)
        tokens = common[:n_same] + list(range(n_tokens - n_same))
        began = time.thread_time()
        prompt = RoutedPrompt(key, n_tokens, chain(tokens), 100, str(key))
        replica, found = fleet.rank(prompt, key / 100)[0]
        fleet.book(replica, prompt, found.missing, key / 100)
        taken.append(time.thread_time() - began)
    return taken


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each policy and workload."""
    rows = []
    for result in results:
        seconds = (f"{result[f'ttft_p{p}_s']:.2f}" for p in (50, 95, 99))
        workload = result["workload"]
        hits, tps = f"{result['hits']:.0%}", f"{result['tps']:.0f}"
        cells = (workload["prefixes"], workload["zipf"], result["router"], hits, tps, *seconds)
        worst = f"{result['backlog_s']:.0f}", f"{result['imbalance']:.1f}"
        rows.append((*cells, *worst))
    return benchmark.table(_HEADER, rows)


def parse_args(argv: Sequence[str] | None) -> tuple[list[Workload], Path | None]:
    """The workloads, and where the JSON goes."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.routing", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--replicas", type=bounded(2, 256), default=64)
    parser.add_argument("--slots", type=bounded(1, 64), default=16)
    parser.add_argument("--clients", type=bounded(1, 4096), default=640)
    parser.add_argument("--requests", type=bounded(1, 100_000), default=10_000)
    parser.add_argument("--prefixes", type=listed(bounded(1, 100_000)), default=(500, 1000))
    parser.add_argument("--zipf", type=listed(float), default=(1.0, 0.8))
    parser.add_argument("--routers", type=bounded(1, 64), default=4)
    parser.add_argument("--json", type=Path, default=None)
    args = vars(parser.parse_args(argv))
    json_file, prefixes, zipf = (args.pop(name) for name in ("json", "prefixes", "zipf"))
    workloads = [
        Workload(**args, prefixes=n, zipf=exponent) for n, exponent in product(prefixes, zipf)
    ]
    return workloads, json_file


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, time the decision, print the tables, write the JSON."""
    workloads, json_file = parse_args(argv)
    results = [simulated(workload, name) for workload in workloads for name in _POLICIES]
    taken = decision_s()
    first = workloads[0]
    print(
        f"Simulated: {first.replicas} replicas of {first.slots} slots, {first.clients} clients.\n"
    )
    print(table(results))
    p50, p99 = (1e6 * percentile(taken, p) for p in (50, 99))
    print(
        f"\nMeasured on {cpu_name()}: a decision takes {p50:.0f} us (p50), {p99:.0f} us (p99) of CPU."
    )
    if json_file is not None:
        json_file.write_text(json.dumps({"simulated": results, "decision_s": taken}))


if __name__ == "__main__":
    main()
