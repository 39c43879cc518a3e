"""Measures a batch alone, and beside people who chat. No Ray, no HTTP.

    python -m loadtests.batch --model PATH [--batched-bench PATH] [--rounds 3] [--seconds 45] [--slots 16]
        [--users 2] [--think 4] [--user-prompt 96] [--user-answer 48] [--line-prompt 128]
        [--line-answer 64] [--threads N] [--ways batch,people,both]

One engine, in a process of its own, is measured in turns. In `batch` it has lines only, as many as
it takes in. In `people` it has users only, who ask, read the answer, think and ask again, four
questions to a conversation. In `both` it has the same users, and lines behind them. People leave
the time in which none of them waits for an answer or for more of one. The batch uses a part of it:
its speed in `both` over its speed in `batch`. With --batched-bench, llama.cpp's own tool computes
lines of the same size in every round, with as many at once as it is fastest with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadtests.batch import native
from loadtests.batch.engine import measure
from loadtests.batch.figures import Window, used_of_left
from loadtests.batch.people import Shape
from serve_app.cli.measure import process
from serve_app.cli.measure.benchmark import (
    choice,
    in_turns,
    list_of,
    machine,
    machine_line,
    number_between,
    of_each,
    ratios,
    spread,
    table,
    usable_cores,
)
from serve_app.cli.measure.process import text_tokens
from serve_app.engine import Engine, EngineOptions

BATCH, PEOPLE, BOTH = "batch", "people", "both"
_WAYS = (BATCH, PEOPLE, BOTH)
_MARGIN_S = 300


class Bench:
    """One engine, and llama.cpp's tool, in turns."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._settings = settings
        self._shape = shape_of(settings)
        self._vocabulary = text_tokens(settings.model)
        self._sizes: Sequence[int] = native.SIZES

    def measure(self) -> list[dict[str, Window]]:
        """The rounds, by ways."""
        settings, shape = self._settings, self._shape
        options = EngineOptions(
            n_slots=shape.n_slots,
            n_ctx_slot=shape.n_ctx_slot,
            threads=settings.threads,
            cache_ram_bytes=2**30,
        )
        self._pool = process.start_process(Engine.load, settings.model, options)
        with self._pool:
            ways = (*settings.ways, native.NATIVE) if settings.batched_bench else settings.ways
            return in_turns(ways, settings.rounds, self._turn, warm_up=False)

    def _turn(self, number: int, way: str) -> Window:
        found = self._native() if way == native.NATIVE else self._engine(number, way)
        cells = f"{found.tokens_per_s:.1f} tokens/s of lines, {len(found.turns)} turns"
        if found.turns:
            cells += (
                f", left {found.left:.2f}, TTFT p95 {found.ttft_s:.3f}, gap p99 {found.gap_s:.3f}"
            )
        print(f"round {number}, {way}: {cells}", file=sys.stderr, flush=True)
        return found

    def _engine(self, number: int, way: str) -> Window:
        seconds = self._settings.seconds
        call = self._pool.submit(
            measure,
            self._shape,
            self._vocabulary,
            number,
            seconds,
            people=way != BATCH,
            lines=way != PEOPLE,
        )
        return call.result(seconds + _MARGIN_S)

    def _native(self) -> Window:
        settings = self._settings
        found = native.tokens_per_s(
            settings.batched_bench, settings.model, self._shape, self._sizes, settings.threads
        )
        best = max(found, key=found.__getitem__)
        self._sizes = (best,)
        print(f"{native.NATIVE}: {found}", file=sys.stderr)
        return Window(1.0, line_tokens=found[best])


def report(rounds: Sequence[dict[str, Window]], peers: Sequence[str] = (native.NATIVE,)) -> str:
    """Markdown tables: the figures of each way, and the ratios in which the rounds are compared, to peers
    that were measured, too."""
    by_way = dict(of_each(rounds))
    header = ("", "lines, tokens/s", "TTFT p95, s", "gap p99, s", "left by people")
    rows = [(way, *_cells(windows)) for way, windows in by_way.items()]
    compared = [(name, spread(values or [])) for name, values in _ratios(by_way, peers)]
    return f"{table(header, rows)}\n\n{table(('in each round', 'median (min-max)'), compared)}"


def _ratios(
    by_way: dict[str, list[Window]], peers: Sequence[str]
) -> Iterator[tuple[str, list[float] | None]]:
    if set(_WAYS) <= by_way.keys():
        batch, people, both = (by_way[way] for way in _WAYS)
        yield "of what people leave, the batch uses", used_of_left(both, people, batch)
    if {PEOPLE, BOTH} <= by_way.keys():
        both, people = by_way[BOTH], by_way[PEOPLE]
        firsts = [one.ttft_s for one in both], [one.ttft_s for one in people]
        yield "TTFT p95, both to people", ratios(*firsts)
        gaps = [one.gap_s for one in both], [one.gap_s for one in people]
        yield "gap p99, both to people", ratios(*gaps)
    for peer in peers:
        if {BATCH, peer} <= by_way.keys():
            speeds = [[one.tokens_per_s for one in by_way[way]] for way in (BATCH, peer)]
            yield f"batch to {peer}", ratios(*speeds)


def _cells(windows: Sequence[Window]) -> list[str]:
    lines = spread([one.tokens_per_s for one in windows if one.line_tokens])
    if not all(one.turns for one in windows):
        return [lines, "-", "-", "-"]
    figures = ([one.ttft_s for one in windows], [one.gap_s for one in windows])
    return [lines, *map(spread, figures), spread([one.left for one in windows])]


def tell(number: int, way: str, found: Window) -> None:
    """Say how a window went."""
    cells = f"{found.tokens_per_s:.1f} tokens/s of lines, {len(found.turns)} turns"
    if found.turns:
        cells += f", left {found.left:.2f}, TTFT p95 {found.ttft_s:.3f}, gap p99 {found.gap_s:.3f}"
    print(f"round {number}, {way}: {cells}", file=sys.stderr, flush=True)


def shape_of(settings: argparse.Namespace) -> Shape:
    """The shape that `add_arguments` has read."""
    return Shape(
        n_slots=settings.slots,
        users=settings.users,
        user_prompt=settings.user_prompt,
        user_answer=settings.user_answer,
        think_s=settings.think,
        line_prompt=settings.line_prompt,
        line_answer=settings.line_answer,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of both benchmarks."""
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=number_between(1, 100), default=3)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--slots", type=number_between(1, 256), default=16)
    parser.add_argument("--users", type=number_between(1, 64), default=2)
    parser.add_argument("--think", type=float, default=4.0)
    for name, default in (
        ("user-prompt", 96),
        ("user-answer", 48),
        ("line-prompt", 128),
        ("line-answer", 64),
    ):
        parser.add_argument(f"--{name}", type=number_between(2, 4096), default=default)
    parser.add_argument("--threads", type=number_between(1, 256), default=usable_cores())


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.batch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    parser.add_argument("--batched-bench", type=Path)
    parser.add_argument("--ways", type=list_of(choice(*_WAYS)), default=_WAYS)
    settings = parser.parse_args()
    print(machine_line(machine(settings.model, settings.threads)), file=sys.stderr)
    print(report(Bench(settings).measure()))


if __name__ == "__main__":
    main()
