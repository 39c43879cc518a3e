"""What the engine costs over a bare llama.cpp loop at the same batch. No Ray, no HTTP.

    python -m loadtests.engine --model PATH [--slots 1,4,8,16] [--prompt-tokens 128]
        [--max-tokens 64] [--pairs 3] [--threads N] [--json FILE]

Both sides get the same model, context, prompts, sampler chain and number of tokens, each in a process of
its own, and take turns: A B, B A, ... Each pair has fresh random prompts, so that nobody finds a prefix
in its cache. Compare the two sides of one pair, not the figures of two machines or days. A run that
gives another number of tokens than asked for ends the benchmark with an error. A quiet machine shows
two busy cores for two threads and few preemptions in the progress lines.

Progress goes to stderr, a Markdown table to stdout, and every single run to the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadtests.bare_loop import text_tokens
from loadtests.engine_sides import BARE, ENGINE, BenchmarkError, Run, Side
from serve_app.engine import EngineOptions

SEED = 20
RATES = ("decode_tps", "whole_tps", "prefill_tps")


@dataclass(frozen=True, slots=True)
class Settings:
    """What one invocation measures."""

    model: Path
    slots: tuple[int, ...]
    """Batch sizes: each is an engine of that many slots, all of them busy."""
    prompt_tokens: int
    """Of each sequence."""
    max_tokens: int
    """Of each sequence; exactly as many are generated."""
    pairs: int
    threads: int

    def options(self, slots: int) -> EngineOptions:
        """The engine that fits; the bare loop copies its sizes."""
        return EngineOptions(
            n_slots=slots,
            n_ctx_slot=self.prompt_tokens + self.max_tokens + 1,
            threads=self.threads,
            max_stall_s=None,  # the bare loop has no such bound
        )


Pair = dict[str, Run]
"""One run of each side, by its name, with the same prompts."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which that many percent lie, interpolated; `values` in any order."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratios(pairs: Sequence[Pair], rate: str) -> dict[str, Any]:
    """Engine over bare, for each pair of runs, with median and spread."""
    values = [getattr(pair[ENGINE], rate) / getattr(pair[BARE], rate) for pair in pairs]
    median = statistics.median(values)
    return {"pairs": values, "median": median, "min": min(values), "max": max(values)}


def side_summary(runs: Sequence[Run]) -> dict[str, float]:
    """Medians over one side's runs; latencies over all their tokens, in milliseconds."""
    ttft = [s for run in runs for s in run.ttft_s]
    itl = [s for run in runs for s in run.itl_s]
    return {
        **{name: statistics.median(getattr(run, name) for run in runs) for name in RATES},
        "ttft_p50_ms": 1000 * percentile(ttft, 50),
        "itl_p50_ms": 1000 * percentile(itl, 50),
        "itl_p99_ms": 1000 * percentile(itl, 99),
    }


def summary(slots: int, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Everything about one batch size."""
    return {
        "slots": slots,
        "decode_ratio": ratios(pairs, "decode_tps"),
        "whole_ratio": ratios(pairs, "whole_tps"),
        ENGINE: side_summary([pair[ENGINE] for pair in pairs]),
        BARE: side_summary([pair[BARE] for pair in pairs]),
        "runs": [
            {"pair": i}
            | asdict(run)
            | {name: getattr(run, name) for name in ("generated_tokens", "wall_s", *RATES)}
            for i, pair in enumerate(pairs)
            for run in pair.values()
        ],
    }


def check(run: Run, slots: int, settings: Settings) -> None:
    """Raises BenchmarkError unless the run did exactly the work that was asked for."""
    counts = [len(times) for times in run.arrivals_s]
    if counts != [settings.max_tokens] * slots:
        raise BenchmarkError(
            f"The {run.side} side generated {counts} tokens, not {settings.max_tokens} each."
        )
    if run.prompt_tokens != settings.prompt_tokens * slots:
        raise BenchmarkError(f"The {run.side} side computed {run.prompt_tokens} prompt tokens.")


def measure(slots: int, settings: Settings) -> list[Pair]:
    """A warm-up and then `pairs` runs of each side, in turns."""
    options = settings.options(slots)
    vocabulary = text_tokens(settings.model)
    rng = random.Random(SEED)
    pairs: list[Pair] = []
    with (
        Side(ENGINE, settings.model, options) as engine,
        Side(BARE, settings.model, options) as bare,
    ):
        order = [(ENGINE, engine), (BARE, bare)]
        for number in range(settings.pairs + 1):
            prompts = [
                tuple(rng.choices(vocabulary, k=settings.prompt_tokens)) for _ in range(slots)
            ]
            pair: Pair = {}
            for name, side in order:
                run = side.run(prompts, settings.max_tokens)
                check(run, slots, settings)
                pair[name] = run
                _progress(f"{slots} slots, " + (f"pair {number}" if number else "warm-up"), run)
            pairs.append(pair)
            order.reverse()
    return pairs[1:]


def _progress(what: str, run: Run) -> None:
    print(
        f"{what}, {run.side}: {run.decode_tps:.1f} t/s decoding, {run.whole_tps:.1f} in all; "
        f"{run.steps} steps in {run.wall_s:.2f} s, {run.cpu_s / run.wall_s:.2f} cores; per step "
        f"{run.sleeps / run.steps:.1f} sleeps, {run.preemptions / run.steps:.1f} preemptions",
        file=sys.stderr,
        flush=True,
    )


def machine(settings: Settings) -> dict[str, Any]:
    """What the figures depend on. `model_mb` is in units of 10^6 bytes."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "model": settings.model.name,
        "model_mb": round(settings.model.stat().st_size / 1e6),
        "llama_cpp_python": version("llama-cpp-python"),
        "threads": settings.threads,
        "prompt_tokens": settings.prompt_tokens,
        "max_tokens": settings.max_tokens,
    }


def table(facts: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """A line of facts and a Markdown table; rates as engine / bare, medians of the pairs."""
    lines = [
        "{cpu}, {cores} cores, {model} ({model_mb} MB), llama-cpp-python {llama_cpp_python}, "
        "{threads} threads, {prompt_tokens} prompt tokens, {max_tokens} generated".format(**facts),
        "",
        "| slots | decode t/s, engine / bare | ratio (min-max) | whole run t/s | ratio (min-max) "
        "| prefill t/s | TTFT p50 ms | ITL p50 ms | ITL p99 ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        engine, bare = result[ENGINE], result[BARE]
        decode, whole, prefill = (f"{engine[name]:.1f} / {bare[name]:.1f}" for name in RATES)
        decode_ratio, whole_ratio = (
            "{median:.3f} ({min:.3f}-{max:.3f})".format(**result[name])
            for name in ("decode_ratio", "whole_ratio")
        )
        latencies = (f"{engine[f'{name}_ms']:.1f}" for name in ("ttft_p50", "itl_p50", "itl_p99"))
        row = (result["slots"], decode, decode_ratio, whole, whole_ratio, prefill, *latencies)
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def _bounded(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}.")
        return value

    return parse


def parse_args(argv: Sequence[str] | None) -> tuple[Settings, Path | None]:
    """The settings, and where the JSON goes."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    slot_count = _bounded(1, 64)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--slots", type=lambda text: tuple(map(slot_count, text.split(","))), default=(1, 4, 8, 16)
    )
    parser.add_argument("--prompt-tokens", type=_bounded(1, 8192), default=128)
    parser.add_argument("--max-tokens", type=_bounded(8, 4096), default=64)
    parser.add_argument("--pairs", type=_bounded(1, 50), default=3)
    parser.add_argument("--threads", type=_bounded(1, 512), default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, default=None)
    args = vars(parser.parse_args(argv))
    json_file: Path | None = args.pop("json")
    return Settings(**args), json_file


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    settings, json_file = parse_args(argv)
    facts = machine(settings)
    results = [summary(slots, measure(slots, settings)) for slots in settings.slots]
    print(table(facts, results))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
