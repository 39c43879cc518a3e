"""Measures what viewers of the live page (`GET /v1/live`) cost a server's users.

    python -m loadtests.load.live_overhead --model PATH [--users 8] [--viewers 3] [--pairs 5]

Starts `serve run` on loopback. Users ask all at once, with fresh prompts of random tokens, and read
streams of 64 tokens: once while nobody watches and once while some do, in turns (B A, A B, ...). The
viewers are a process of their own, which reads what it gets and does nothing with it. A first pair warms
up. Prints each figure's median without viewers, and the ratio with them to without in the same pair,
median (min-max).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from loadtests.common.benchmark import bounded, table
from loadtests.common.bursts import FIGURES, random_requests, run
from loadtests.common.processes import with_default_signals
from loadtests.common.rounds import in_turns, of_each, ratio_spread
from loadtests.common.servers import exit_on_sigterm, serve_run

# Reads until it is ended; streams end after a minute and are asked for again.
_VIEW = """
import sys, threading, httpx
def read():
    while True:
        with httpx.stream("GET", sys.argv[1] + "/v1/live", timeout=None) as response:
            for _ in response.iter_bytes():
                pass
for _ in range(int(sys.argv[2])):
    threading.Thread(target=read).start()
"""
_SETTLE_S = 3.0
"""Until the first looks are over, or the last one is."""


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.load.live_overhead", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--users", type=bounded(1, 64), default=8)
    parser.add_argument("--viewers", type=bounded(1, 64), default=3)
    parser.add_argument("--pairs", type=bounded(1, 100), default=5)
    args = parser.parse_args()
    model = {
        "id": "model",
        "source": {"path": str(args.model.resolve())},
        "engine": {"n_slots": args.users, "n_ctx_slot": 1024},
    }
    with serve_run(model) as server:

        def burst(number: int, n_viewers: int) -> dict[str, float]:
            print(f"pair {number} of {args.pairs}, {n_viewers} watch", file=sys.stderr)
            with _viewers(server.url, n_viewers):
                time.sleep(_SETTLE_S)
                return run(server.url, random_requests(args.users, 128, 64)).figures()

        pairs = in_turns((0, args.viewers), args.pairs, burst)
    print(f"{args.users} users, {args.viewers} viewers, {len(pairs)} pairs\n")
    print(_table(pairs))


@contextmanager
def _viewers(url: str, n: int) -> Iterator[None]:
    process = subprocess.Popen(with_default_signals(sys.executable, "-c", _VIEW, url, str(n)))
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _table(pairs: Sequence[Mapping[int, Mapping[str, float]]]) -> str:
    """The pairs are of nobody who watches, and of some."""
    alone, viewed = (found for _, found in of_each(pairs))
    rows = []
    for name in FIGURES:
        without, beside = ([figures[name] for figures in found] for found in (alone, viewed))
        rows.append((name, f"{statistics.median(without):.3g}", ratio_spread(beside, without)))
    return table(("figure", "nobody watches", "with viewers, ratio"), rows)


if __name__ == "__main__":
    exit_on_sigterm()
    main()
