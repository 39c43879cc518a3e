"""Which build of llama.cpp is fastest on this machine: compilers, threads, libraries. No Ray, no HTTP.

    python -m loadtests.tune.builds --model PATH [--ways "own threads, poll 50; clang"] [--beside 0]
        [--sequences 1,4,16] [--prompt-tokens 128] [--max-tokens 48] [--rounds 5] [--threads N] [--jobs N]

Compiles what is not there, some minutes for each build, and keeps it under ~/.cache/corral. Every way has a
process of its own with the least Python that can serve sequences, and they take turns: A B C, C B A. Ways
are separated by semicolons. `clang` needs Debian's packages clang-19 and libomp-19-dev, and
`OpenBLAS` libopenblas-dev.

--beside N has another process compute meanwhile, in short pieces, for so many percent of one core's time,
as Ray's processes and the ingress do.

A Markdown table goes to stdout, progress to stderr. Ratios are to the installed build in the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from loadtests.common.benchmark import (
    Prompts,
    bounded,
    choice,
    listed,
    machine,
    machine_line,
    table,
    usable_cores,
)
from loadtests.common.rounds import in_turns, of_each, ratio_spread
from loadtests.engine.bare_loop import text_tokens
from loadtests.engine.run import Run
from loadtests.tune.builds import libraries
from loadtests.tune.builds.ways import WAYS, run, started
from serve_app.engine import EngineOptions

_BASELINE = "installed"
_DEFAULT = ("without repacking", "without llamafile", "own threads, poll 50")
_TIMEOUT_S = 300
_PERIOD_S = 0.01

Found = Mapping[int, Run]
"""Runs by the number of sequences."""


def main() -> int:
    """Compile, measure, and print the table."""
    args = _arguments()
    names = [_BASELINE, *(name for name in args.ways if name != _BASELINE)]
    built = {name: _library(name, args.jobs) for name in names}
    prompts = Prompts(text_tokens(args.model))
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(started(built[name], WAYS[name], args.model, _options(args)))
            for name in names
        }

        def visit(number: int, name: str) -> Found:
            print(f"round {number}: {name}", file=sys.stderr, flush=True)
            return _visit(pools[name], args, prompts)

        with _busy(args.beside):
            rounds = in_turns(names, args.rounds, visit)
    print(f"{machine_line(machine(args.model, args.threads))}; {args.beside}% of a core beside:\n")
    print(_table(rounds, args.sequences))
    return 0


def _library(name: str, jobs: int) -> Path | None:
    way = WAYS[name]
    return libraries.built(way.build, way.flags, jobs) if way.build else None


def _options(args: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        n_slots=max(args.sequences),
        n_ctx_slot=args.prompt_tokens + args.max_tokens + 1,
        threads=args.threads,
    )


def _visit(pool: ProcessPoolExecutor, args: argparse.Namespace, prompts: Prompts) -> Found:
    found = {}
    for n in args.sequences:
        drawn = [prompts.draw(args.prompt_tokens) for _ in range(n)]
        found[n] = pool.submit(run, drawn, args.max_tokens).result(_TIMEOUT_S)
    return found


def _table(rounds: Sequence[Mapping[str, Found]], sequences: Sequence[int]) -> str:
    """Medians of the installed build; the others' ratios."""
    figures: dict[str, Callable[[Found], float | None]] = {
        "prompts": lambda found: found[max(sequences)].prefill_tps,
        **{f"decode {n}": partial(_decode_tps, n) for n in sequences},
    }
    by_way = dict(of_each(rounds))
    rows = []
    for name, found in by_way.items():
        cells = []
        for figure in figures.values():
            values, baseline = ([figure(one) for one in way] for way in (found, by_way[_BASELINE]))
            if name == _BASELINE:
                cells.append(f"{statistics.median(value or 0 for value in values):.0f} tokens/s")
            else:
                cells.append(ratio_spread(values, baseline))
        rows.append((name, *cells))
    return table(("way", *figures), rows)


def _decode_tps(n: int, found: Found) -> float | None:
    return found[n].decode_tps


@contextmanager
def _busy(percent: int) -> Iterator[None]:
    """Another process that computes for so much of the time."""
    if not percent:
        yield
        return
    code = (
        "import time\n"
        "while True:\n"
        f"    end = time.perf_counter() + {_PERIOD_S * percent / 100}\n"
        "    while time.perf_counter() < end: pass\n"
        f"    time.sleep({_PERIOD_S * (100 - percent) / 100})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _ways(text: str) -> tuple[str, ...]:
    return tuple(choice(*WAYS)(name.strip()) for name in text.split(";"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.tune.builds", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ways", type=_ways, default=_DEFAULT)
    parser.add_argument("--beside", type=bounded(0, 100), default=0)
    parser.add_argument("--sequences", type=listed(bounded(1, 64)), default=(1, 4, 16))
    parser.add_argument("--prompt-tokens", type=bounded(1, 4096), default=128)
    parser.add_argument("--max-tokens", type=bounded(2, 4096), default=48)
    parser.add_argument("--rounds", type=bounded(1, 50), default=5)
    parser.add_argument("--threads", type=bounded(1, 512), default=usable_cores())
    parser.add_argument("--jobs", type=bounded(1, 512), default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
