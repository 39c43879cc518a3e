"""Measures what it costs that requests of one engine have different LoRA adapters. No Ray, no HTTP.

    python -m loadtests.engine.adapters --model PATH [--adapters 3] [--rank 16] [--streams 16]
        [--prompt-tokens 64] [--max-tokens 48] [--rounds 2] [--threads N] [--kv-unified auto|on|off]

The streams come together, as many for the model itself as for each adapter, whose weights are random. These
ways to serve them take turns on one engine:
    adapters     all at once
    apart        the streams of one adapter after those of another
    base         all at once, for the model itself
    base, parts  the same, as many at once as have the same adapter above
A step serves one adapter's streams, so "base, parts" computes steps of the same size, without adapters and
without switches. Besides, each stream runs alone, and so does each of "base".

Texts are greedy. Two that differ need not be wrong: llama.cpp's kernels sum in another order if a batch has
another number of rows, and a tie goes the other way. So the texts of "adapters" are compared with "apart",
where steps have the same rows, and those of the model itself are the measure of what rounding does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from loadtests.common.benchmark import (
    bounded,
    machine,
    machine_line,
    percentile,
    spread,
    table,
    usable_cores,
)
from loadtests.common.rounds import of_each, ratio_spread
from loadtests.engine.adapters.bench import (
    ADAPTERS,
    APART,
    BASE,
    PARTS,
    SWITCH,
    Bench,
    Run,
    Text,
)

_HEADER = ("way", "tokens/s", "to `base, parts`", "gap p50, ms", "p99", "longest")


def equal_texts(some: Sequence[Text], others: Sequence[Text]) -> str:
    """How many are equal, for people."""
    n_equal = sum(one == other for one, other in zip(some, others, strict=True))
    return f"{n_equal} of {len(some)}"


def report(rounds: Sequence[dict[str, Run]]) -> str:
    """The ways' speeds and gaps, as a table."""
    by_way = dict(of_each(rounds))
    parts = [one.tokens_per_s for one in by_way[PARTS]]
    rows = []
    for way, runs in by_way.items():
        speeds = [one.tokens_per_s for one in runs]
        gaps = [1000 * gap for one in runs for gap in one.gaps_s]
        told = (percentile(gaps, 50), percentile(gaps, 99), max(gaps))
        rows.append((way, spread(speeds), ratio_spread(speeds, parts), *(f"{x:.0f}" for x in told)))
    return table(_HEADER, rows)


def longest_allowed_s(run: Run, n_sets: int, max_stall_s: float | None) -> float:
    """The longest wait of a stream beside the others: the bound on stalls, and a step of each other
    adapter, by the longest that they have when they run apart."""
    return (max_stall_s or 0.0) + (n_sets - 1) * max(run.gaps_s)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.engine.adapters", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=bounded(1, 16), default=3)
    parser.add_argument("--rank", type=bounded(1, 256), default=16)
    parser.add_argument("--streams", type=bounded(2, 64), default=16)
    parser.add_argument("--prompt-tokens", type=bounded(1, 10_000), default=64)
    parser.add_argument("--max-tokens", type=bounded(2, 10_000), default=48)
    parser.add_argument("--rounds", type=bounded(1, 100), default=2)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--kv-unified", choices=SWITCH, default="auto")
    settings = parser.parse_args()
    if settings.streams <= settings.adapters:
        parser.error("there are fewer streams than adapters and the model itself")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(settings, Path(folder))
        try:
            rounds = bench.run()
            alone = {way: bench.alone(way) for way in (ADAPTERS, BASE)}
        finally:
            bench.close()
    last = rounds[-1]
    print(machine_line(machine(settings.model, settings.threads)))
    print(report(rounds))
    n_sets = settings.adapters + 1
    most_s = longest_allowed_s(last[APART], n_sets, bench.options.max_stall_s)
    longest_s = max(last[ADAPTERS].gaps_s)
    print(f"Longest gap beside other adapters: {longest_s:.2f} s; allowed: {most_s:.2f} s.")
    print("Equal texts:")
    rows = [
        ("adapters at once, and apart", last[ADAPTERS].texts, last[APART].texts),
        ("adapters at once, and each alone", last[ADAPTERS].texts, alone[ADAPTERS]),
        ("adapters apart, and each alone", last[APART].texts, alone[ADAPTERS]),
        ("base in parts, and each alone", last[PARTS].texts, alone[BASE]),
        ("base at once, and each alone", last[BASE].texts, alone[BASE]),
        ("base at once, and base in parts", last[BASE].texts, last[PARTS].texts),
    ]
    print(table(("what", "equal"), [(name, equal_texts(*both)) for name, *both in rows]))


if __name__ == "__main__":
    main()
