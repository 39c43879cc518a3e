"""Measures how streams and a long prompt slow each other over HTTP, in Corral and llama-server.

    python -m loadtests.compare.frontier --model PATH [--bounds 100,250,500,1000] [--batches 32,64,128,512]
        [--streams 2] [--words 1200] [--slots 4] [--rounds 5] [--threads N] [--corral corral|bare]
        [--backends llama.cpp,openvino] [--engine '{"kv_unified": true}'] [--server PATH] [--json FILE]
        [--plot FILE.svg]

Streams run; then a prompt of so many words comes, each of them a token. Measured are the streams' gaps
until the prompt has its first text, and the time that takes. Both servers have one setting that trades one
for the other: Corral's `max_stall_ms`, each of --bounds, and llama-server's `--batch-size`, each of
--batches. Every one of them is a server of its own, with --slots slots of the same size. With --backends,
Corral has servers with each of these.

All are started and warmed up, and then take turns, round by round: A B C, C B A, ... One runs at a time;
the processes of all others are stopped meanwhile (SIGSTOP). All sides of a round get the same fresh
prompts. Ratios are to llama-server with the largest batch, in the same round.

Progress goes to stderr, a Markdown table to stdout, every single gap to the JSON file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from loadtests.common.comparing import absolute, ratio_spread
from loadtests.common.plot import Chart, svg
from loadtests.common.servers import Server, exit_on_sigterm
from loadtests.compare import llama_server
from loadtests.compare.requests import read_words, request
from loadtests.compare.sides import CORRAL, LLAMA_SERVER, RAY, Sizes, engine_settings, start
from serve_app.cli.measure.benchmark import (
    SEED,
    BenchmarkError,
    Prompt,
    choice,
    in_turns,
    list_of,
    machine_and_model,
    number_between,
    of_each,
    percentile,
    spread,
    table,
    usable_cores,
)
from serve_app.cli.measure.outcomes import Reader

REST_S = 2.0
"""Seconds in which a server may do what it puts off until nobody waits."""
TIMEOUT_S = 300.0
_STREAM_WORDS = 64
_CALM_PIECES = 12
"""Texts that every stream has before the long prompt comes."""
_ANSWER = 512
"""Tokens of a slot behind the longest prompt."""
_HEADER = (
    *("side", "calm gap p50, ms", "gaps p99, ms", "p99 by round", "longest"),
    *("prompt's TTFT, s", "ratio"),
)


@dataclass(frozen=True, slots=True)
class Side:
    """A server, and what it trades gaps for the prompt's time with."""

    kind: str
    setting: int
    """Corral's `max_stall_ms`, llama-server's `--batch-size`."""
    backend: str = ""
    """Corral's `engine.backend`, where it is set."""

    def __str__(self) -> str:
        is_peer = self.kind == LLAMA_SERVER
        setting = f"-b {self.setting}" if is_peer else f"{self.setting} ms"
        return " ".join(part for part in (self.kind, self.backend, setting) if part)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one invocation."""

    model: Path
    bounds: tuple[int, ...]
    batches: tuple[int, ...]
    streams: int
    words: int
    slots: int
    rounds: int
    threads: int
    corral: str
    server: Path
    engine: Mapping[str, Any] = field(default_factory=dict)
    backends: tuple[str, ...] = ("",)

    @property
    def sides(self) -> tuple[Side, ...]:
        """Corral's first."""
        ours = (
            Side(self.corral, bound, backend) for backend in self.backends for bound in self.bounds
        )
        return (*ours, *(Side(LLAMA_SERVER, batch) for batch in self.batches))

    @property
    def baseline(self) -> Side:
        """The side that the prompt's times are compared with."""
        if not self.batches:
            return self.sides[-1]
        return Side(LLAMA_SERVER, max(self.batches))


@dataclass(frozen=True, slots=True)
class Found:
    """One side's times in one round, in seconds."""

    ttft_s: float
    """From sending the long prompt to its first text."""
    calm_s: tuple[float, ...]
    """Gaps between a stream's texts before the long prompt came."""
    gaps_s: tuple[float, ...]
    """Gaps that ended while it was computed; of a stream without one, how long the gap was by then."""


def between(times: Sequence[float], came: float, done: float) -> tuple[list[float], list[float]]:
    """A stream's gaps before a moment, and those between that and another. Pure. See `Found`."""
    calm = [b - a for a, b in pairwise(times) if b <= came]
    ended = [b - a for a, b in pairwise(times) if came < b <= done]
    return calm, ended or [done - max(time for time in times if time <= done)]


def measure(settings: Settings) -> list[dict[Side, Found]]:
    """All rounds, each with every side."""
    vocabulary = list(read_words(settings.model).tokens)
    with ExitStack() as opened:
        servers: dict[Side, Server] = {}
        for side in settings.sides:
            servers[side] = opened.enter_context(_started(side, settings))
            servers[side].pause()

        def run(number: int, side: Side) -> Found:
            prompts = _prompts(vocabulary, number, settings)
            servers[side].go_on()
            time.sleep(REST_S)
            found = asyncio.run(_round(servers[side].url, *prompts))
            time.sleep(REST_S)  # in which those that left are noticed
            servers[side].pause()
            print(f"round {number}: {_line(side, [found])}", file=sys.stderr, flush=True)
            return found

        return in_turns(settings.sides, settings.rounds, run)


def _started(side: Side, settings: Settings) -> AbstractContextManager[Server]:
    is_peer = side.kind == LLAMA_SERVER
    sizes = Sizes(settings.threads, settings.slots, n_ctx_slot=settings.words + _ANSWER)
    if is_peer:
        sizes = replace(sizes, n_batch=side.setting)
    engine = {} if is_peer else {"max_stall_ms": side.setting} | dict(settings.engine)
    if side.backend:
        engine["backend"] = side.backend
    return start(side.kind, settings.model, sizes, settings.server, engine)


def _prompts(
    vocabulary: Sequence[int], number: int, settings: Settings
) -> tuple[Prompt, list[Prompt]]:
    """A round's long prompt, and the streams': the same for every side."""
    rng = random.Random(f"{SEED} {number} frontier")
    streams = [tuple(rng.choices(vocabulary, k=_STREAM_WORDS)) for _ in range(settings.streams)]
    return tuple(rng.choices(vocabulary, k=settings.words)), streams


async def _round(url: str, long: Prompt, streams: Sequence[Prompt]) -> Found:
    arrivals: list[list[float]] = [[] for _ in streams]
    calm = asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        asyncio.timeout(TIMEOUT_S),
        aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout()) as session,
        asyncio.TaskGroup() as group,
    ):
        readers = [
            group.create_task(_read(session, prompt, i, arrivals, calm))
            for i, prompt in enumerate(streams)
        ]
        await calm.wait()
        came = time.perf_counter()
        await _first_text(session, long)
        done = time.perf_counter()
        for reader in readers:
            reader.cancel()
    parts = [between(times, came, done) for times in arrivals]
    return Found(
        done - came,
        calm_s=tuple(gap for before, _ in parts for gap in before),
        gaps_s=tuple(gap for _, beside in parts for gap in beside),
    )


async def _read(
    session: aiohttp.ClientSession,
    prompt: Prompt,
    number: int,
    arrivals: Sequence[list[float]],
    calm: asyncio.Event,
) -> None:
    """Note when a stream's texts come, until it is cancelled."""
    body = request(prompt, number) | {"max_tokens": _ANSWER}
    reader = Reader()
    async with session.post("/v1/completions", json=body) as response:
        async for data in response.content.iter_any():
            now = time.perf_counter()
            arrivals[number] += [now] * reader.feed(now, data)
            if all(len(times) > _CALM_PIECES for times in arrivals):
                calm.set()
    raise BenchmarkError("A stream ended before the long prompt had its first text.")


async def _first_text(session: aiohttp.ClientSession, prompt: Prompt) -> None:
    body = request(prompt, 0) | {"max_tokens": 8}
    reader = Reader()
    async with session.post("/v1/completions", json=body) as response:
        async for data in response.content.iter_any():
            if reader.feed(time.perf_counter(), data):
                return
    raise BenchmarkError(f"The long prompt has no answer: {reader.answer().error}")


# -- the report ----------------------------------------------------------------------------------


def report(settings: Settings, rounds: Sequence[Mapping[Side, Found]]) -> str:
    """A line of facts, and the table."""
    facts = machine_and_model(settings.model)
    lines = [
        "{cpu}, {cores} cores, {model} ({model_mb} MB).".format(**facts),
        f"{settings.streams} streams and a prompt of {settings.words} words, {settings.slots} slots, "
        f"{settings.rounds} rounds: medians (min-max). Ratios to {settings.baseline} in the same round.",
    ]
    if settings.engine:
        lines += [f"Corral's engine has {json.dumps(settings.engine)}."]
    baseline = [one[settings.baseline].ttft_s for one in rounds]
    rows = [
        (side, *_cells(found), ratio_spread([one.ttft_s for one in found], baseline))
        for side, found in of_each(rounds)
    ]
    return "\n".join([*lines, "", table(_HEADER, rows)])


def _cells(found: Sequence[Found]) -> list[str]:
    calm, gaps = ([gap for one in found for gap in getattr(one, n)] for n in ("calm_s", "gaps_s"))
    return [
        f"{1000 * statistics.median(calm):.0f}",
        f"{1000 * percentile(gaps, 99):.0f}",
        _ms([percentile(one.gaps_s, 99) for one in found]),
        f"{1000 * max(gaps):.0f}",
        spread([one.ttft_s for one in found]),
    ]


def _ms(seconds: Sequence[float]) -> str:
    low, middle, high = (1000 * of(seconds) for of in (min, statistics.median, max))
    return f"{middle:.0f} ({low:.0f}-{high:.0f})"


def _line(side: Side, found: Sequence[Found]) -> str:
    cells = zip(_HEADER[1:], _cells(found), strict=False)
    return f"{side}: " + ", ".join(f"{name} {value}" for name, value in cells)


def plot(settings: Settings, rounds: Sequence[Mapping[Side, Found]]) -> str:
    """Two charts, as SVG: the gaps' p99 and the prompt's time, by setting."""
    found = dict(of_each(rounds))
    p99_s = {
        side: statistics.median(percentile(x.gaps_s, 99) for x in found[side]) for side in found
    }
    ttft_s = {side: statistics.median(x.ttft_s for x in found[side]) for side in found}
    title = f"{settings.streams} streams beside a prompt of {settings.words} words"
    return svg(
        f"{title}: {settings.model.name}, medians of {settings.rounds} rounds",
        "max_stall_ms of Corral, -b of llama-server",
        [_chart("streams' gap p99, s", p99_s), _chart("prompt's time to first text, s", ttft_s)],
    )


def _chart(title: str, values: Mapping[Side, float]) -> Chart:
    names = {side: f"{side.kind} {side.backend}".strip() for side in values}
    lines = {
        name: [value if names[side] == name else None for side, value in values.items()]
        for name in dict.fromkeys(names.values())
    }
    return Chart(title, [str(side.setting) for side in values], lines)


# -- the command line ----------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None) -> tuple[Settings, Path | None, Path | None]:
    """The settings, and where the JSON and the plot go."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.frontier", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=absolute, required=True)
    parser.add_argument(
        "--bounds", type=list_of(number_between(10, 60_000)), default=(100, 250, 500, 1000)
    )
    parser.add_argument(
        "--batches", type=list_of(number_between(1, 4096)), default=(32, 64, 128, 512)
    )
    parser.add_argument("--streams", type=number_between(1, 32), default=2)
    parser.add_argument("--words", type=number_between(16, 30_000), default=1200)
    parser.add_argument("--slots", type=number_between(2, 64), default=4)
    parser.add_argument("--rounds", type=number_between(1, 50), default=5)
    parser.add_argument("--threads", type=number_between(1, 512), default=usable_cores())
    parser.add_argument("--corral", choices=(CORRAL, RAY), default=CORRAL)
    backends = choice("llama.cpp", "openvino")
    parser.add_argument("--backends", type=list_of(backends), default=("",))
    parser.add_argument("--engine", type=engine_settings, default={})
    llama_server.add_option(parser)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    args = vars(parser.parse_args(argv))
    json_file, plot_file = args.pop("json"), args.pop("plot")
    settings = Settings(**args)
    if settings.streams >= settings.slots:
        parser.error("The long prompt needs a slot beside the streams.")
    if settings.batches:
        llama_server.expect(parser, settings.server)
    return settings, json_file, plot_file


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files."""
    settings, json_file, plot_file = parse_args(argv)
    rounds = measure(settings)
    print(report(settings, rounds))
    if json_file is not None:
        found = [{str(side): asdict(one) for side, one in of.items()} for of in rounds]
        document = {"machine": machine_and_model(settings.model), "rounds": found}
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    if plot_file is not None:
        plot_file.write_text(plot(settings, rounds))


if __name__ == "__main__":
    exit_on_sigterm()
    main()
