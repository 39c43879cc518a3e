"""How many texts a second become vectors with both backends, and whether these agree. No Ray, no HTTP.

    python -m loadtests.tune.texts --model PATH [--texts 32] [--lengths 32,128] [--rounds 5] [--threads N]

Both engines are open at once, and take turns: each embeds so many random texts of a length. Needs
corral[openvino].

A Markdown table goes to stdout: medians, the ratio in the same round, and the least cosine of two vectors
of one text.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from loadtests.common.comparing import ratio_spread
from serve_app.base.engine_options import KernelsName
from serve_app.cli.measure.benchmark import (
    in_turns,
    list_of,
    machine,
    machine_line,
    number_between,
    of_each,
    table,
    usable_cores,
)
from serve_app.engine import Engine, EngineOptions

_TIMEOUT_S = 600


def main() -> None:
    """Measure, and print the table."""
    args = _arguments()
    lines, names = [], get_args(KernelsName)
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in names:
            options = EngineOptions(
                n_slots=1,
                n_ctx_slot=max(512, *args.lengths),
                threads=args.threads,
                backend=name,
                profile_limit_s=0,
            )
            engines[name] = Engine.load(args.model, options)
            stack.callback(engines[name].close, 0)
        for length in args.lengths:
            rng = np.random.default_rng(length)
            texts = [tuple(map(int, row)) for row in rng.integers(5, 500, (args.texts, length))]

            def vectors(name: str, texts: list[tuple[int, ...]] = texts) -> NDArray[np.float32]:
                return engines[name].embed(texts).result(_TIMEOUT_S)

            def texts_per_s(_: int, name: str, n: int = len(texts)) -> float:
                began = time.perf_counter()
                vectors(name)
                return n / (time.perf_counter() - began)

            first, second = (vectors(name).astype(np.float64) for name in names)
            norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
            rounds = in_turns(names, args.rounds, texts_per_s)
            theirs, ours = (dict(of_each(rounds))[name] for name in names)
            figures = (f"{statistics.median(speeds):.0f}" for speeds in (theirs, ours))
            cosine = float(((first * second).sum(axis=1) / norms).min())
            lines.append((length, *figures, ratio_spread(ours, theirs), f"{cosine:.5f}"))
    print(f"{machine_line(machine(args.model, args.threads))}\n")
    head = ("tokens of a text", *(f"{name}, texts/s" for name in names), "ratio", "cosine")
    print(table(head, lines))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtests.tune.texts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=number_between(1, 2048), default=32)
    parser.add_argument("--lengths", type=list_of(number_between(1, 8192)), default=(32, 128))
    parser.add_argument("--rounds", type=number_between(1, 100), default=5)
    parser.add_argument("--threads", type=number_between(1, 512), default=usable_cores())
    return parser.parse_args()


if __name__ == "__main__":
    main()
