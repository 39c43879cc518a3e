"""What a pass of OpenVINO's kernels takes, by its rows and by what is before them. No Ray, no HTTP.

    python -m loadtests.tune.paged_passes --model PATH [--rows 1,28,128] [--depths 0,2048,4096]
        [--cache-types f16,bf16] [--rounds 5] [--threads N]

A pass has rows of one sequence, of which the last has logits. All formats of the cache are open at once and
take turns, pass by pass: A B, B A. Needs corral[openvino].

A Markdown table goes to stdout: medians in milliseconds, and ratios to the first format in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import get_args

from loadtests.common.comparing import ratio_spread
from serve_app.base.formats import Quantization
from serve_app.cli.measure.benchmark import (
    choice,
    in_turns,
    list_of,
    machine,
    machine_line,
    number_between,
    of_each,
    table,
    usable_cores,
)
from serve_app.kernels.llama.model import Model
from serve_app.kernels.openvino.convert import converted_of
from serve_app.kernels.openvino.paged.blocks import BLOCK
from serve_app.kernels.openvino.paged.compiling import CacheType
from serve_app.kernels.openvino.paged.context import PagedContext
from serve_app.kernels.openvino.paged.model import PagedModel, PagedOptions

_TOKEN = 5
"""Of all rows: which one does not matter to the time."""


def main() -> None:
    """Measure, and print the table."""
    args = _arguments()
    n_ctx = max(args.depths) + max(args.rows)
    model = Model(args.model, vocab_only=True)
    with ExitStack() as stack:
        contexts = {
            kind: stack.enter_context(closing(paged_context(model, n_ctx, args.threads, kind)))
            for kind in args.cache_types
        }
        found = {
            (n_rows, depth): in_turns(
                args.cache_types, args.rounds, _visit(contexts, n_rows, depth)
            )
            for depth in args.depths
            for n_rows in args.rows
        }
    print(f"{machine_line(machine(args.model, args.threads))}\n")
    print(report(found))


def _visit(
    contexts: Mapping[str, PagedContext], n_rows: int, depth: int
) -> Callable[[int, str], float]:
    return lambda _, kind: pass_s(contexts[kind], n_rows, depth)


def pass_s(context: PagedContext, n_rows: int, depth: int) -> float:
    """Seconds of a pass of so many rows of a sequence, behind so many tokens."""
    context.truncate(0, 0)
    if depth:
        context.pretend(0, depth)
    rows = [(_TOKEN, depth + i, 0, i == n_rows - 1) for i in range(n_rows)]
    began = time.perf_counter()
    context.decode(rows)
    return time.perf_counter() - began


def report(found: Mapping[tuple[int, int], Sequence[Mapping[str, float]]]) -> str:
    """A row for each number of rows and depth."""
    kinds = list(next(iter(found.values()))[0])
    lines = []
    for (n_rows, depth), rounds in found.items():
        by_kind = dict(of_each(rounds))
        cells = [f"{1000 * statistics.median(by_kind[kinds[0]]):.0f} ms"]
        for kind in kinds[1:]:
            ms = 1000 * statistics.median(by_kind[kind])
            cells.append(f"{ms:.0f} ms, {ratio_spread(by_kind[kind], by_kind[kinds[0]])}")
        lines.append((n_rows, depth, *cells))
    return table(("rows", "behind", *kinds), lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.tune.paged_passes", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=list_of(number_between(1, 4096)), default=(1, 28, 128))
    parser.add_argument("--depths", type=list_of(number_between(0, 2**20)), default=(0, 2048, 4096))
    kinds = get_args(CacheType)
    parser.add_argument("--cache-types", type=list_of(choice(*kinds)), default=kinds)
    parser.add_argument("--rounds", type=number_between(1, 100), default=5)
    parser.add_argument("--threads", type=number_between(1, 512), default=usable_cores())
    return parser.parse_args()


def paged_context(
    model: Model,
    n_ctx: int,
    threads: int,
    cache_type: CacheType,
    quantization: Quantization = "none",
) -> PagedContext:
    """OpenVINO's context for one sequence of so many tokens, warmed up. The model is converted where an
    engine would do so, and needs its vocabulary only. Raises ConfigError."""
    options = PagedOptions(
        n_sequences=1,
        n_ctx_slot=n_ctx,
        n_blocks=-(-n_ctx // BLOCK),
        threads=threads,
        cache_type=cache_type,
    )
    layers = PagedModel(converted_of(model, None, quantization=quantization), options)
    context = PagedContext(layers, model, options)
    context.warm_up()
    return context


if __name__ == "__main__":
    main()
