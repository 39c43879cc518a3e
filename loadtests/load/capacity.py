"""Measures how many users a deployment holds.

    python -m loadtests.load.capacity --slo ttft_p95=2s,itl_p95=150ms (--url URL | --configs FILE ...)
        [--mix chat=1] [--think 5] [--seconds 60] [--most 256] [--seed 20] [--model NAME]

Doubles the users until the SLO is missed, then halves the difference, to a tenth. A load holds if each
percentile is within its bound and nothing was refused or failed. Each number of users is tried once, for
--seconds: where two loads are close, so are their verdicts. With several configurations, each is started,
measured and stopped in turn, and the one that holds the most is named. Percentiles are those of the report:
ttft, itl, e2e at p50, p95, p99. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.common import benchmark
from loadtests.common.benchmark import SEED, bounded
from loadtests.common.servers import exit_on_sigterm
from loadtests.load.driver import Load, LoadError, Result, drive
from loadtests.load.stream_metrics import Slo
from loadtests.load.target import Target, opened
from loadtests.load.users import mixes

UNITS = {"ttft": "s", "itl": "ms", "e2e": "s"}
_TERM = re.compile(r"(ttft|itl|e2e)_(p50|p95|p99)=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Held:
    """The number of users that a configuration holds."""

    name: str
    users: int
    """0: not even one."""
    figures: Mapping[str, float | None]
    """With so many."""


def parse_slo(text: str) -> dict[str, float]:
    """`ttft_p95=2s,itl_p95=150ms`: bounds by the report's names of figures, in their units. Raises
    ValueError."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        found = _TERM.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{part!r}: expected ttft|itl|e2e _p50|p95|p99 =NUMBER ms|s.")
        name, percent, value, unit = found.groups()
        seconds = float(value) / (1000 if unit == "ms" else 1)
        wanted = UNITS[name]
        bounds[f"{name}_{percent}_{wanted}"] = seconds * (1000 if wanted == "ms" else 1)
    return bounds


def misses(result: Result, bounds: Mapping[str, float]) -> list[str]:
    """Why this load does not hold; nothing, if it does."""
    figures, books = result.figures(), result.accounts
    found = [f"{n} {end}" for n, end in ((books.refused, "refused"), (books.failed, "failed")) if n]
    for name, bound in bounds.items():
        value = figures[name]
        if value is None or value > bound:
            found.append(f"{name} {'unknown' if value is None else f'{value:.3g}'} > {bound:g}")
    return found


def most_users(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number that holds, to a tenth: 0 if not even 1 does, `limit` at most. Calls `holds` with
    each number once."""
    low, high = 0, 1
    while holds(high):
        if high == limit:
            return limit
        low, high = high, min(2 * high, limit)
    while high - low > max(1, low // 10):
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def measure(
    target: Target,
    load_of: Callable[[int], Load],
    bounds: Mapping[str, float],
    limit: int,
    name: str,
) -> Held:
    """The number of users that this server holds."""
    tried: dict[int, Mapping[str, float | None]] = {0: {}}

    def holds(users: int) -> bool:
        result = drive(target, load_of(users))
        missed = misses(result, bounds)
        tried[users] = result.figures()
        values = ", ".join(f"{key} {tried[users][key] or 0:.3g}" for key in bounds)
        verdict = f"misses: {'; '.join(missed)}" if missed else "holds"
        other = "" if result.other_cores is None else f" (others: {result.other_cores:.1f} cores)"
        print(f"{name}, {users} users: {values}: {verdict}{other}", file=sys.stderr, flush=True)
        return not missed

    users = most_users(holds, limit)
    return Held(name, users, tried[users])


def table(held: Sequence[Held], bounds: Mapping[str, float]) -> str:
    """Every configuration with what it holds, as Markdown, and the best."""
    header = ["configuration", "users", *bounds, "tokens/s"]
    rows = []
    for one in held:
        values = [one.figures.get(name) for name in (*bounds, "tokens_per_s")]
        cells = ["-" if value is None else f"{value:.3g}" for value in values]
        rows.append([one.name, one.users, *cells])
    best = max(held, key=lambda one: (one.users, one.figures.get("tokens_per_s") or 0.0))
    return f"{benchmark.table(header, rows)}\n\nHolds the most: {best.name}, {best.users} users."


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.load.capacity", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--slo",
        type=parse_slo,
        required=True,
        help="what users should get, as ttft_p95=2s,itl_p95=150ms",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server that runs already")
    where.add_argument(
        "--configs", type=Path, nargs="+", help="configuration files; each is served in turn"
    )
    parser.add_argument(
        "--mix", type=mixes.checked_mix, default="chat=1", help="what users do, as chat=6,rag=2"
    )
    parser.add_argument(
        "--think", type=float, default=5.0, help="seconds between an answer and the next question"
    )
    parser.add_argument(
        "--seconds", type=bounded(5, 3600), default=60, help="the time of each load"
    )
    parser.add_argument(
        "--most",
        type=bounded(1, 5000),
        default=256,
        help="the highest number of users that is tried",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="decides what is asked")
    parser.add_argument(
        "--model", default="", help="the model that is asked; by default the server's first"
    )
    args = parser.parse_args(argv)
    slo = Slo(args.slo.get("ttft_p95_s", 2.0), args.slo.get("itl_p95_ms", 150.0) / 1000)

    def load_of(users: int) -> Load:
        return Load(users, args.seconds, args.mix, args.think, args.seed, args.model, slo)

    held = []
    for config in args.configs or [None]:
        name = config.stem if config else args.url
        try:
            with opened(args.url, config) as target:
                held.append(measure(target, load_of, args.slo, args.most, name))
        except (LoadError, RuntimeError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    if not held:
        sys.exit("Nothing could be measured.")
    print(table(held, args.slo))


if __name__ == "__main__":
    exit_on_sigterm()
    main()
