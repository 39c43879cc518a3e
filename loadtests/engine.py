"""What the engine costs over a bare llama.cpp loop at the same batch. No Ray, no HTTP.

    python -m loadtests.engine --model PATH [--slots 1,4,8,16] [--prompt-tokens 128]
        [--max-tokens 64] [--pairs 3] [--threads N] [--json FILE]

Both sides get the same model, context, prompts, sampler chain and number of tokens, and take turns: A B,
B A, ... Each pair has fresh random prompts, so that nobody finds a prefix in its cache. Compare the
two sides of one pair, not the figures of two machines or days. A run that gives another number of
tokens than asked for ends the benchmark with an error.

Progress goes to stderr, a Markdown table to stdout, and every single run to the JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtests.bare_loop import BareLoop, Prompt
from serve_app.engine import (
    CorralError,
    Engine,
    EngineOptions,
    GenerationRequest,
    SamplingParams,
    TokenStream,
)

RUN_TIMEOUT_S = 600.0
SEED = 20
ENGINE, BARE = "engine", "bare"
RATES = ("decode_tps", "whole_tps", "prefill_tps")


class BenchmarkError(Exception):
    """The two sides did not do the same work: there is nothing to compare."""


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
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One batch on one side. Rates are in tokens per second."""

    side: str
    pair: int
    prompt_tokens: int
    """Of all sequences."""
    arrivals_s: tuple[tuple[float, ...], ...]
    """For each sequence, when each of its tokens was there, in seconds from the start."""
    steps: int
    """Calls of `llama_decode`."""
    cpu_s: float
    """CPU seconds of the process; less than threads times wall seconds if it had to wait."""

    @property
    def generated_tokens(self) -> int:
        """Of all sequences."""
        return sum(len(times) for times in self.arrivals_s)

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the last token."""
        return max(times[-1] for times in self.arrivals_s)

    @property
    def whole_tps(self) -> float:
        """Generated tokens over the whole run, prompts included."""
        return self.generated_tokens / self.wall_s

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens until every sequence had its first token."""
        return self.prompt_tokens / max(times[0] for times in self.arrivals_s)

    @property
    def decode_tps(self) -> float:
        """Generated tokens while every sequence was decoding."""
        begin = max(times[0] for times in self.arrivals_s)
        end = min(times[-1] for times in self.arrivals_s)
        rate = 0.0
        for times in self.arrivals_s:
            inside = [t for t in times if begin <= t <= end]
            if len(inside) < 2 or inside[-1] <= inside[0]:
                raise BenchmarkError("The sequences hardly decoded together: raise --max-tokens.")
            rate += (len(inside) - 1) / (inside[-1] - inside[0])
        return rate

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first token, of each sequence."""
        return [times[0] for times in self.arrivals_s]

    @property
    def itl_s(self) -> list[float]:
        """Seconds between tokens that follow each other; 0 for two that came together."""
        return [b - a for times in self.arrivals_s for a, b in pairwise(times)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which that many percent lie, interpolated; `values` in any order."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratios(runs: Sequence[Run], rate: Callable[[Run], float]) -> dict[str, Any]:
    """Engine over bare, for each pair of runs, with median and spread."""
    sides = {(run.side, run.pair): rate(run) for run in runs}
    pairs = [sides[ENGINE, i] / sides[BARE, i] for i in sorted({run.pair for run in runs})]
    median = statistics.median(pairs)
    return {"pairs": pairs, "median": median, "min": min(pairs), "max": max(pairs)}


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


def summary(slots: int, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything about one batch size."""
    return {
        "slots": slots,
        "decode_ratio": ratios(runs, lambda run: run.decode_tps),
        "whole_ratio": ratios(runs, lambda run: run.whole_tps),
        ENGINE: side_summary([run for run in runs if run.side == ENGINE]),
        BARE: side_summary([run for run in runs if run.side == BARE]),
        "runs": [
            asdict(run)
            | {name: getattr(run, name) for name in ("generated_tokens", "wall_s", *RATES)}
            for run in runs
        ],
    }


def run_engine(engine: Engine, prompts: Sequence[Prompt], max_tokens: int, pair: int) -> Run:
    """All prompts at once through the engine, each read by a task of its own."""
    before, cpu = engine.stats(), time.process_time()
    arrivals = asyncio.run(_read_all(engine, prompts, max_tokens))
    after, cpu = engine.stats(), time.process_time() - cpu
    if after.cached_tokens != before.cached_tokens:
        raise BenchmarkError("The engine found a part of a fresh prompt in its cache.")
    steps = after.steps - before.steps
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    return Run(ENGINE, pair, prompt_tokens, arrivals, steps, cpu)


async def _read_all(
    engine: Engine, prompts: Sequence[Prompt], max_tokens: int
) -> tuple[tuple[float, ...], ...]:
    requests = [
        GenerationRequest(
            f"sequence-{i}",
            prompt,
            SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(RUN_TIMEOUT_S):
        start = time.perf_counter()
        outcomes = engine.submit_many(requests)
        return tuple(await asyncio.gather(*(_read(stream, start) for stream in outcomes)))


async def _read(stream: TokenStream | CorralError, start: float) -> tuple[float, ...]:
    if isinstance(stream, CorralError):
        raise stream
    times: list[float] = []
    async with stream:
        async for delta in stream:
            times += [time.perf_counter() - start] * len(delta.token_ids)
    return tuple(times)


def run_bare(loop: BareLoop, prompts: Sequence[Prompt], max_tokens: int, pair: int) -> Run:
    """All prompts at once through the bare loop."""
    cpu = time.process_time()
    arrivals, steps = loop.run(prompts, max_tokens, range(len(prompts)), RUN_TIMEOUT_S)
    cpu = time.process_time() - cpu
    prompt_tokens = sum(map(len, prompts))
    return Run(BARE, pair, prompt_tokens, tuple(map(tuple, arrivals)), steps, cpu)


def check(run: Run, slots: int, settings: Settings) -> None:
    """Raises BenchmarkError unless the run did exactly the work that was asked for."""
    counts = [len(times) for times in run.arrivals_s]
    if counts != [settings.max_tokens] * slots:
        raise BenchmarkError(
            f"The {run.side} side generated {counts} tokens, not {settings.max_tokens} each."
        )
    if run.prompt_tokens != settings.prompt_tokens * slots:
        raise BenchmarkError(f"The {run.side} side computed {run.prompt_tokens} prompt tokens.")


def measure(slots: int, settings: Settings) -> list[Run]:
    """A warm-up and then `pairs` runs of each side, in turns."""
    options = settings.options(slots)
    rng = random.Random(SEED)
    engine = Engine.load(settings.model, options)
    try:
        with BareLoop(settings.model, options) as bare:
            text_tokens = bare.text_tokens()
            runs: list[Run] = []
            for pair in range(-1, settings.pairs):
                prompts = [
                    tuple(rng.choices(text_tokens, k=settings.prompt_tokens)) for _ in range(slots)
                ]
                for side in (ENGINE, BARE) if pair % 2 == 0 else (BARE, ENGINE):
                    if side == ENGINE:
                        run = run_engine(engine, prompts, settings.max_tokens, pair)
                    else:
                        run = run_bare(bare, prompts, settings.max_tokens, pair)
                    check(run, slots, settings)
                    runs.append(run)
                    _progress(slots, run)
    finally:
        engine.close()
    return [run for run in runs if run.pair >= 0]


def _progress(slots: int, run: Run) -> None:
    name = "warm-up" if run.pair < 0 else f"pair {run.pair + 1}"
    print(
        f"{slots} slots, {name}, {run.side}: {run.decode_tps:.1f} t/s decoding, "
        f"{run.whole_tps:.1f} t/s in all, {run.steps} steps, {run.wall_s:.2f} s "
        f"({run.cpu_s:.2f} s of CPU)",
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
