"""The first request of a fresh engine that got other engines' prefixes. No Ray, no HTTP.

    python -m loadtests.engine.warm_start --model PATH [--shared 512] [--own 32] [--rounds 5]

An elder has answered requests that begin with the same `--shared` tokens and go on with `--own` others. In
every round, one more such request is asked of the elder, of an engine in a new process that has the elder's
hottest prefixes, and of one that has nothing; in turns, one at a time. Each engine has all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from loadtests.common.benchmark import (
    Prompt,
    Prompts,
    bounded,
    machine,
    machine_line,
    spread,
    table_row,
    usable_cores,
)
from loadtests.engine import process
from loadtests.engine.bare_loop import text_tokens
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.kv_cache import state_format
from serve_app.engine.kv_cache.hot_prefixes import hottest
from serve_app.engine.kv_cache.transfer import Payload

ELDER, FRESH, COLD = "a warm engine", "a fresh one with its prefixes", "a fresh one without"
_SAMPLING = SamplingParams(max_tokens=4)
_WARM_UP = 3
_TIMEOUT_S = 300


def _ttft(prompt: Prompt) -> float:
    """Seconds from a request to its first token."""
    return asyncio.run(_ask(process.engine(), prompt))


async def _ask(engine: Engine, prompt: Prompt) -> float:
    began, first = time.perf_counter(), 0.0
    async for _ in engine.submit(GenerationRequest("request", prompt, _SAMPLING)):
        first = first or time.perf_counter() - began
    return first


def _export() -> list[tuple[Payload, int]]:
    """What the engine would give to a new one, and how many of the tokens are wanted."""
    prefixes = process.engine().prefixes
    wanted = hottest(prefixes.offers(2), [], prefixes.budget_bytes)
    lent = [
        (prefixes.export_prefix(one.prefix), state_format.n_tokens(one.prefix.tokens))
        for one in wanted
    ]
    return [(payload, n_tokens) for payload, n_tokens in lent if payload is not None]


def _import(lent: list[tuple[Payload, int]]) -> tuple[int, float]:
    """Take that; returns the bytes that are kept, and how long it took."""
    began = time.perf_counter()
    n_bytes = sum(process.engine().prefixes.import_prefix(*one) for one in lent)
    return n_bytes, time.perf_counter() - began


class Bench:
    """Engines in processes of their own, which get the same requests."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._model: Path = settings.model
        self._options = EngineOptions(
            n_slots=4,
            n_ctx_slot=settings.shared + settings.own + 256,
            threads=usable_cores(),
            cache_ram_bytes=2**30,
            profile_limit_s=0,
        )
        self._n_own: int = settings.own
        self._prompts = Prompts(text_tokens(settings.model))
        self._shared = self._prompts.draw(settings.shared)

    def _prompt(self) -> Prompt:
        return self._shared + self._prompts.draw(self._n_own)

    def _process(self) -> ProcessPoolExecutor:
        return process.started(self._model, self._options)

    def run(self, n_rounds: int) -> dict[str, list[float]]:
        """Seconds to the first token in each round."""
        seconds: dict[str, list[float]] = {ELDER: [], FRESH: [], COLD: []}
        with self._process() as elder:
            for _ in range(_WARM_UP):
                elder.submit(_ttft, self._prompt()).result(_TIMEOUT_S)
            for number in range(n_rounds):
                seconds[ELDER].append(elder.submit(_ttft, self._prompt()).result(_TIMEOUT_S))
                lent = elder.submit(_export).result(_TIMEOUT_S)
                with self._process() as fresh:
                    n_bytes, adopt_s = fresh.submit(_import, lent).result(_TIMEOUT_S)
                    seconds[FRESH].append(fresh.submit(_ttft, self._prompt()).result(_TIMEOUT_S))
                with self._process() as cold:
                    seconds[COLD].append(cold.submit(_ttft, self._prompt()).result(_TIMEOUT_S))
                took = ", ".join(f"{way}: {times[-1]:.3f} s" for way, times in seconds.items())
                print(
                    f"Round {number}: {took}; {n_bytes / 2**20:.0f} MiB taken in {adopt_s:.3f} s.",
                    file=sys.stderr,
                    flush=True,
                )
        return seconds


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.engine.warm_start", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--shared", type=bounded(32, 100_000), default=512)
    parser.add_argument("--own", type=bounded(1, 10_000), default=32)
    parser.add_argument("--rounds", type=bounded(1, 100), default=5)
    settings = parser.parse_args()
    seconds = Bench(settings).run(settings.rounds)
    print(machine_line(machine(settings.model, usable_cores())))
    print("| asked of | time to first token, ms | to a warm one |\n| --- | --- | --- |")
    for way, times in seconds.items():
        ratios = [one / warm for one, warm in zip(times, seconds[ELDER], strict=True)]
        print(table_row([way, f"{1000 * statistics.median(times):.0f}", spread(ratios)]))


if __name__ == "__main__":
    main()
