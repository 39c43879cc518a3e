"""Measures what replicas on one machine gain from cores of their own. No Ray, no HTTP.

    python -m loadtests.engine.pinning --model PATH [--replicas 2] [--sequences 4] [--seconds 20]
        [--lead-s 3] [--rounds 3]

Every replica is a process with an engine of its own, which computes with its share of the cores and
decodes that many sequences without a pause. All of them run at once, pinned to disjoint cores or where
the kernel puts them; the two ways take turns, in the same processes. Tokens/s are of all replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence, Set
from pathlib import Path

from loadtests.common.benchmark import (
    Prompt,
    Prompts,
    bounded,
    machine,
    machine_line,
    usable_cores,
)
from loadtests.common.rounds import compared, in_turns
from loadtests.engine import process
from loadtests.engine.bare_loop import text_tokens
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams

PINNED, FREE = "pinned", "not pinned"
_PROMPT_TOKENS = 32
_N_CTX_SLOT = 2048
_TIMEOUT_S = 300


def _run(prompts: Sequence[Prompt], cores: Set[int], begin: float, seconds: float) -> float:
    """This process's tokens/s on these cores, for so many seconds from `begin` on, by time.time()."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
    return asyncio.run(_decode(process.engine(), prompts, begin, seconds))


async def _decode(engine: Engine, prompts: Sequence[Prompt], begin: float, seconds: float) -> float:
    sampling = SamplingParams(max_tokens=_N_CTX_SLOT - _PROMPT_TOKENS, ignore_eos=True)
    requests = [GenerationRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    streams = [engine.submit(request) for request in requests]
    await asyncio.sleep(begin - time.time())
    before, began = engine.stats().tokens.generated_tokens, time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (engine.stats().tokens.generated_tokens - before) / (time.perf_counter() - began)
    for request, stream in zip(requests, streams, strict=True):
        engine.abort(request.id)
        async for _ in stream:  # to its end
            pass
    return rate


def measure(settings: argparse.Namespace) -> list[dict[str, float]]:
    """Tokens/s of all replicas together in each round."""
    draw = Prompts(text_tokens(settings.model)).draw
    share = usable_cores() // settings.replicas
    options = EngineOptions(
        n_slots=settings.sequences,
        n_ctx_slot=_N_CTX_SLOT,
        threads=share,
        speculate=False,
        profile_limit_s=0,
    )
    pools = [process.started(settings.model, options) for _ in range(settings.replicas)]

    def run(number: int, way: str) -> float:
        begin = time.time() + settings.lead_s
        runs = []
        for pool, cores in zip(pools, _cores(way, share, settings.replicas), strict=True):
            prompts = [draw(_PROMPT_TOKENS) for _ in range(settings.sequences)]
            runs.append(pool.submit(_run, prompts, cores, begin, settings.seconds))
        rate = sum(run.result(_TIMEOUT_S) for run in runs)
        print(f"{way}, round {number}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)
        return rate

    rounds = in_turns((PINNED, FREE), settings.rounds, run)
    for pool in pools:
        pool.shutdown()
    return rounds


def _cores(way: str, share: int, n_replicas: int) -> list[set[int]]:
    """The cores that each replica may run on."""
    cores = sorted(os.sched_getaffinity(0))
    if way == FREE:
        return [set(cores)] * n_replicas
    return [set(cores[i * share : (i + 1) * share]) for i in range(n_replicas)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.engine.pinning", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--replicas", type=bounded(1, usable_cores()), default=usable_cores())
    parser.add_argument("--sequences", type=bounded(1, 64), default=4)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--lead-s", type=float, default=3, help="time for prompts, before")
    parser.add_argument("--rounds", type=bounded(1, 100), default=3)
    settings = parser.parse_args()
    rounds = measure(settings)
    print(machine_line(machine(settings.model, usable_cores() // settings.replicas)))
    print(compared(rounds, FREE, ("way", "tokens/s", "to not pinned"), "{:.1f}".format))


if __name__ == "__main__":
    main()
