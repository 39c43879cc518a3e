"""Measures the first request of a fresh engine that got other engines' prefixes. No Ray, no HTTP.

    python -m loadtests.engine.warm_start --model PATH [--shared 512] [--own 32] [--rounds 5]

A warm engine has answered requests that begin with the same `--shared` tokens and go on with `--own`
others. In every round, one more such request is asked of it, of an engine in a new process that has its
hottest prefixes, and of one that has nothing; in turns, one at a time. Each engine has all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from loadtests.common import asking
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
from serve_app.engine import EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.kv_cache import packing
from serve_app.engine.kv_cache.transfers.hot_prefixes import hottest
from serve_app.engine.kv_cache.transfers.transfer import Payload

WARM, FRESH, COLD = "a warm engine", "a fresh one with its prefixes", "a fresh one without"
_SAMPLING = SamplingParams(max_tokens=4)
_WARM_UP = 3
_TIMEOUT_S = 300


def _ttft(prompt: Prompt) -> float:
    """Seconds from a request to its first token."""
    request = GenerationRequest("request", prompt, _SAMPLING)
    return asyncio.run(asking.ttft_s(process.engine(), request))


def _export() -> list[tuple[Payload, int]]:
    """The prefixes that the engine would give to a new one, and how many of the tokens are wanted."""
    prefixes = process.engine().prefixes
    wanted = hottest(prefixes.offers(2), [], prefixes.budget_bytes)
    lent = [
        (prefixes.export_prefix(one.prefix), packing.n_tokens(one.prefix.tokens)) for one in wanted
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

    def run(self, n_rounds: int) -> list[dict[str, float]]:
        """Seconds to the first token in each round."""
        with self._process() as warm:
            for _ in range(_WARM_UP):
                warm.submit(_ttft, self._prompt()).result(_TIMEOUT_S)
            return in_turns(
                (WARM, FRESH, COLD),
                n_rounds,
                lambda number, way: self._ask(number, way, warm),
                warm_up=False,
            )

    def _ask(self, number: int, way: str, warm: ProcessPoolExecutor) -> float:
        """Seconds to the first token of one more request, asked this way."""
        with ExitStack() as stack:
            asked, taken = warm, ""
            if way != WARM:
                asked = stack.enter_context(self._process())
            if way == FRESH:
                exported = warm.submit(_export).result(_TIMEOUT_S)
                n_bytes, import_s = asked.submit(_import, exported).result(_TIMEOUT_S)
                taken = f"; {n_bytes / 2**20:.0f} MiB taken in {import_s:.3f} s"
            seconds: float = asked.submit(_ttft, self._prompt()).result(_TIMEOUT_S)
        print(f"{way}, round {number}: {seconds:.3f} s{taken}", file=sys.stderr, flush=True)
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
    rounds = Bench(settings).run(settings.rounds)
    print(machine_line(machine(settings.model, usable_cores())))
    header = ("asked of", "time to first token, ms", "to a warm one")
    print(compared(rounds, WARM, header, lambda seconds: f"{1000 * seconds:.0f}"))


if __name__ == "__main__":
    main()
