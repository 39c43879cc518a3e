"""Measures what running streams and a long prompt cost each other. No Ray, no HTTP.

    python -m loadtests.engine.stalls --model PATH [--bounds 250,none] [--streams 2] [--prompt-tokens 2048]
        [--rounds 3] [--threads N] [--flash-attn auto|on|off] [--kv-unified auto|on|off]

Streams decode; then a long prompt arrives. Measured are the streams' gaps between two tokens until the
prompt has its first token, and the time that takes, beside what it takes alone. Every value of
`max_stall_ms` ("none" sets no bound) has an engine in a process of its own; they take turns, with fresh
random prompts. Ratios are to the same engine's time alone, in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from loadtests.common import asking
from loadtests.common.comparing import ratio_spread
from serve_app.cli.measure import process
from serve_app.cli.measure.benchmark import (
    Prompt,
    Prompts,
    in_turns,
    list_of,
    of_each,
    percentile,
    table,
    usable_cores,
)
from serve_app.cli.measure.process import text_tokens
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenStream

_TIMEOUT_S = 300
_SWITCH = {"auto": None, "on": True, "off": False}
_CALM_TOKENS = 8
"""Tokens that every stream has before the long prompt comes."""
_HEADER = (
    "max_stall_ms",
    "calm gap p50, ms",
    "gaps p50",
    "p99",
    "longest",
    "TTFT / alone, s",
    "ratio",
)


@dataclass(frozen=True, slots=True)
class Round:
    """One engine's round, in seconds."""

    alone_s: float
    """The long prompt's time to its first token, alone."""
    beside_s: float
    """The same beside the streams."""
    calm_s: tuple[float, ...]
    """Gaps between a stream's tokens before the long prompt came."""
    gaps_s: tuple[float, ...]
    """Gaps that ended while it was computed; of a stream without one, how long the gap was by then."""


def _run(alone: Prompt, long: Prompt, streams: Sequence[Prompt]) -> Round:
    round_ = _round(process.opened_object(), alone, long, streams)
    return asyncio.run(asyncio.wait_for(round_, _TIMEOUT_S))


async def _round(engine: Engine, alone: Prompt, long: Prompt, streams: Sequence[Prompt]) -> Round:
    alone_s = await asking.ttft_s(engine, _request("alone", alone, 1))
    arrivals: list[list[float]] = [[] for _ in streams]
    calm = asyncio.Event()
    readers = [
        asyncio.create_task(
            _read(engine.submit(_request(f"stream-{i}", prompt, None)), times, arrivals, calm)
        )
        for i, (prompt, times) in enumerate(zip(streams, arrivals, strict=True))
    ]
    await calm.wait()
    came = time.perf_counter()
    beside_s = await asking.ttft_s(engine, _request("long", long, 1))
    done = time.perf_counter()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return Round(
        alone_s,
        beside_s,
        calm_s=tuple(b - a for times in arrivals for a, b in pairwise(times) if b <= came),
        gaps_s=tuple(gap for times in arrivals for gap in _gaps(times, came, done)),
    )


def _gaps(times: Sequence[float], came: float, done: float) -> list[float]:
    ended = [b - a for a, b in pairwise(times) if came < b <= done]
    return ended or [done - max(time for time in times if time <= done)]


def _request(name: str, prompt: Prompt, max_tokens: int | None) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


async def _read(
    stream: TokenStream, times: list[float], arrivals: list[list[float]], calm: asyncio.Event
) -> None:
    async with stream:
        async for delta in stream:
            times += [time.perf_counter()] * len(delta.token_ids)
            if all(len(of_one) > _CALM_TOKENS for of_one in arrivals):
                calm.set()
    raise RuntimeError("A stream ended before the long prompt was done.")


def measure(settings: argparse.Namespace) -> list[dict[str, Round]]:
    """The rounds, by bounds."""
    draw = Prompts(text_tokens(settings.model)).draw
    n = settings.prompt_tokens
    prompts = [
        (draw(n), draw(n), [draw(64) for _ in range(settings.streams)])
        for _ in range(settings.rounds + 1)
    ]
    pools = {
        bound: process.start_process(Engine.load, settings.model, _options(settings, bound))
        for bound in settings.bounds
    }

    def run(number: int, bound: str) -> Round:
        found = pools[bound].submit(_run, *prompts[number]).result(2 * _TIMEOUT_S)
        cells = " | ".join(_cells([found]))
        print(f"{bound} ms, round {number}: {cells}", file=sys.stderr, flush=True)
        return found

    rounds = in_turns(settings.bounds, settings.rounds, run)
    for pool in pools.values():
        pool.shutdown()
    return rounds


def _options(settings: argparse.Namespace, bound: str) -> EngineOptions:
    return EngineOptions(
        n_slots=settings.streams + 1,
        n_ctx_slot=settings.prompt_tokens + 512,
        threads=settings.threads,
        flash_attn=_SWITCH[settings.flash_attn],
        kv_unified=_SWITCH[settings.kv_unified],
        max_stall_ms=math.inf if bound == "none" else float(bound),
    )


def _cells(rounds: Sequence[Round]) -> list[str]:
    calm = [1000 * gap for one in rounds for gap in one.calm_s]
    gaps = [1000 * gap for one in rounds for gap in one.gaps_s]
    alone, beside = ([getattr(one, name) for one in rounds] for name in ("alone_s", "beside_s"))
    return [
        f"{statistics.median(calm):.0f}",
        *(f"{value:.0f}" for value in (statistics.median(gaps), percentile(gaps, 99), max(gaps))),
        f"{statistics.median(beside):.2f} / {statistics.median(alone):.2f}",
        ratio_spread(beside, alone),
    ]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.engine.stalls", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bounds", type=list_of(str), default=("250", "none"))
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--flash-attn", choices=_SWITCH, default="auto")
    parser.add_argument("--kv-unified", choices=_SWITCH, default="auto")
    settings = parser.parse_args()
    rounds = measure(settings)
    print(table(_HEADER, [(bound, *_cells(found)) for bound, found in of_each(rounds)]))


if __name__ == "__main__":
    main()
