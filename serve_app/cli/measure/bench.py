"""Measures the engine alone, without Ray and HTTP, by the number of sequences.

    corral bench MODEL.gguf --sequences 1,4,16

The backends get the same prompts and take turns, each in a process of its own. Every round has fresh random
prompts, the same in every invocation, so that nobody finds a prefix in its cache. All processes stay open
meanwhile, and each needs memory for the model.

A Markdown table goes to stdout, progress to stderr. Speed depends on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, get_args

from serve_app.base.engine_options import KernelsName
from serve_app.base.errors import ConfigError
from serve_app.cli.measure import benchmark
from serve_app.cli.measure.process import MeasuredRun, RunnerProcess, engine_runner, text_tokens
from serve_app.engine import EngineOptions
from serve_app.store.builtin_model import BUILTIN_MODEL

WARM_UP_TOKENS = 8
MIB = 2**20
RATES = ("decode_tps", "whole_tps", "prefill_tps")
LATENCIES = ("ttft_p50_ms", "itl_p50_ms", "itl_p99_ms")
_HEADER = (
    *("sequences", "backend", "decode t/s", "whole run t/s", "prefill t/s"),
    *("TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "peak MiB"),
)


def engine_options(
    sequences: int, prompt_tokens: int, max_tokens: int, **settings: Any
) -> EngineOptions:
    """The engine that fits so many sequences, with these settings, and measures nothing at its start."""
    usual = {"flash_attn": True, "kv_unified": False, "speculate": False, "profile_limit_s": 0}
    return EngineOptions(
        n_slots=sequences,
        n_ctx_slot=prompt_tokens + max_tokens + 1,
        max_stall_ms=math.inf,
        **(usual | settings),
    )


def summary(runs: Sequence[Any]) -> dict[str, float | None]:
    """Medians over the runs, which have the figures of a MeasuredRun; latencies over all their tokens, in
    milliseconds. None where unknown."""
    ttft = [s for run in runs for s in run.ttft_s]
    itl = [s for run in runs for s in run.itl_s]
    return {
        **{name: _median([getattr(run, name) for run in runs]) for name in RATES},
        "ttft_p50_ms": 1000 * benchmark.percentile(ttft, 50),
        "itl_p50_ms": 1000 * benchmark.percentile(itl, 50) if itl else None,
        "itl_p99_ms": 1000 * benchmark.percentile(itl, 99) if itl else None,
        "peak_mib": max(run.peak_bytes for run in runs) / MIB,
    }


def cell(value: float | None) -> str:
    """The value as a cell of a table; a dash if it is unknown."""
    return "-" if value is None else f"{value:.1f}"


def measure_backends(
    args: argparse.Namespace, sequences: int, prompts: benchmark.Prompts
) -> dict[str, dict[str, float | None]]:
    """The summary of each backend with so many sequences. Raises BenchmarkError."""
    options = engine_options(sequences, args.prompt_tokens, args.max_tokens, threads=args.threads)
    drawn = [
        [prompts.draw(args.prompt_tokens) for _ in range(sequences)] for _ in range(args.rounds + 1)
    ]
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(
                RunnerProcess(name, partial(engine_runner, name), args.model, options)
            )
            for name in args.backends
        }

        def run(number: int, name: str) -> MeasuredRun:
            max_tokens = args.max_tokens if number else WARM_UP_TOKENS
            measured = processes[name].run(drawn[number], max_tokens)
            part = f"round {number}" if number else "warm-up"
            print(
                f"{sequences} at once, {part}, {name}: {cell(measured.decode_tps)} t/s decoding",
                file=sys.stderr,
                flush=True,
            )
            return measured

        rounds = benchmark.in_turns(args.backends, args.rounds, run)
    return {name: summary([by_name[name] for by_name in rounds]) for name in args.backends}


def report(results: Mapping[int, Mapping[str, Mapping[str, float | None]]]) -> str:
    """A Markdown table with a row for each number of sequences and backend."""
    rows = [
        (n, name, *(cell(figures[key]) for key in (*RATES, *LATENCIES, "peak_mib")))
        for n, by_name in results.items()
        for name, figures in by_name.items()
    ]
    return benchmark.table(_HEADER, rows)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark.Parser(prog="corral bench", description=__doc__)
    parser.add_model(benchmark.MODEL, type=Path, default=BUILTIN_MODEL)
    backends = benchmark.list_of(benchmark.choice(*get_args(KernelsName)))
    compared = "the backends that are compared"
    parser.add_argument("--backends", type=backends, default=("llama.cpp",), help=compared)
    add_load_arguments(parser)
    parser.add_argument(
        "--json", type=benchmark.new_file, default=None, help="a file for all figures"
    )
    return parser.parse_args(argv)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the load: sequences, lengths, rounds, threads."""
    add, numbers = parser.add_argument, benchmark.list_of(benchmark.number_between(1, 64))
    sequences = "how many run at once, in each run"
    add("--sequences", type=numbers, default=(1, 2, 4, 8, 16), help=sequences)
    tokens = "tokens of each prompt"
    add("--prompt-tokens", type=benchmark.number_between(1, 8192), default=128, help=tokens)
    generated = "tokens that each sequence generates"
    add(
        "--max-tokens",
        type=benchmark.number_between(WARM_UP_TOKENS, 4096),
        default=64,
        help=generated,
    )
    add("--rounds", type=benchmark.number_between(1, 50), default=3, help="runs of each")
    threads = "threads that compute"
    add(
        "--threads",
        type=benchmark.number_between(1, 512),
        default=benchmark.usable_cores(),
        help=threads,
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    args.model = benchmark.model_file(args.model)
    facts = benchmark.machine(args.model, args.threads)
    try:
        prompts = benchmark.Prompts(text_tokens(args.model))
        results = {n: measure_backends(args, n, prompts) for n in args.sequences}
    except (benchmark.BenchmarkError, ConfigError) as error:
        sys.exit(str(error))
    print(f"{benchmark.machine_line(facts)}; medians of {args.rounds} rounds\n\n{report(results)}")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


if __name__ == "__main__":
    main()
