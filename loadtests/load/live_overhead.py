"""What it costs the users of a server that somebody watches it (`GET /v1/live`, as the page does).

    python -m loadtests.load.live_overhead --model PATH [--users 8] [--watchers 3] [--pairs 5]

Starts `serve run` on loopback. Users ask all at once, with fresh prompts of random tokens, and read
streams of 64 tokens: once while nobody watches and once while some do, in turns (A B, B A, ...). The
watchers are a process of their own, which reads what it gets and does nothing with it. Prints each
figure's median without watchers, and the ratio with them to without in the same pair, median (min-max).
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtests.common.benchmark import bounded, spread
from loadtests.common.bursts import FIGURES, run
from loadtests.common.servers import exit_on_sigterm, serve_run

# Watches until it is ended; streams end after a minute and are asked for again.
_WATCH = """
import sys, threading, httpx
def watch():
    while True:
        with httpx.stream("GET", sys.argv[1] + "/v1/live", timeout=None) as response:
            for _ in response.iter_bytes():
                pass
for _ in range(int(sys.argv[2])):
    threading.Thread(target=watch).start()
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
    parser.add_argument("--watchers", type=bounded(1, 64), default=3)
    parser.add_argument("--pairs", type=bounded(1, 100), default=5)
    args = parser.parse_args()
    model = {
        "id": "model",
        "source": {"path": str(args.model.resolve())},
        "engine": {"n_slots": args.users, "n_ctx_slot": 1024},
    }
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    with serve_run(model) as server:
        run(server.url, _requests(args.users))
        for i in range(args.pairs):
            print(f"pair {i + 1} of {args.pairs}", file=sys.stderr)
            found = {n: _burst(server.url, args.users, n) for n in _turns(i, args.watchers)}
            pairs.append((found[0], found[args.watchers]))
    print(_table(pairs, args.users, args.watchers))


def _turns(pair: int, n_watchers: int) -> list[int]:
    return [0, n_watchers] if pair % 2 == 0 else [n_watchers, 0]


def _burst(url: str, n_users: int, n_watchers: int) -> dict[str, float]:
    with _watchers(url, n_watchers):
        time.sleep(_SETTLE_S)
        return run(url, _requests(n_users)).figures()


@contextmanager
def _watchers(url: str, n: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", _WATCH, url, str(n)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _requests(n_users: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [random.randrange(300, 500) for _ in range(128)],
            "max_tokens": 64,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(n_users)
    ]


def _table(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]], n_users: int, n_watchers: int
) -> str:
    lines = [
        f"{n_users} users, {n_watchers} watchers, {len(pairs)} pairs\n",
        "| figure | nobody watches | with watchers, ratio |",
        "| --- | --- | --- |",
    ]
    for name in FIGURES:
        ratios = [watched[name] / alone[name] for alone, watched in pairs]
        alone_median = statistics.median(alone[name] for alone, _ in pairs)
        lines.append(f"| {name} | {alone_median:.3g} | {spread(ratios)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    exit_on_sigterm()
    main()
