"""How both backends read one text: perplexity, and how often the likeliest next token is the same.

    python -m loadtests.tune.perplexity --model PATH [--backends llama.cpp,openvino,openvino-w8a8]
        [--text FILE] [--windows 16] [--threads N]

`-bf16` behind a backend's name has it keep keys and values as bf16, in place of f16. `openvino-w8a8-bf16`
has `engine.quantization: w8a8`, and `openvino-w8a8` has it as on processors without bf16.

The text is read in windows of 256 tokens, each from nothing; what counts is the second half of each. The
default text is what every machine has: Python's own modules. The first backend is what the others are
compared with. Speed is not measured, so the machine need not be quiet.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.base.errors import ConfigError
from serve_app.cli.measure import benchmark, quality
from serve_app.cli.measure.benchmark import choice, list_of, number_between, usable_cores
from serve_app.cli.measure.quality import WINDOW, ReadingContext, TextReading, llama
from serve_app.kernels.llama.model import Model

if TYPE_CHECKING:
    from serve_app.base.formats import Quantization
    from serve_app.kernels.openvino.paged.compiling import CacheType
    from serve_app.kernels.openvino.paged.context import PagedContext


def paged(
    path: Path, threads: int, cache_type: CacheType = "f16", quantization: Quantization = "none"
) -> tuple[Model, PagedContext]:
    """The model's vocabulary and a context of OpenVINO, with keys and values of that format."""
    from loadtests.tune.paged_passes import paged_context  # needs corral[openvino]

    model = Model(path, vocab_only=True)
    return model, paged_context(model, WINDOW, threads, cache_type, quantization)


KERNELS: dict[str, Callable[..., tuple[Model, Any]]] = {"llama.cpp": llama, "openvino": paged}
BACKENDS: dict[str, ReadingContext] = {
    **KERNELS,
    **{f"{name}-bf16": partial(opened, cache_type="bf16") for name, opened in KERNELS.items()},
    "openvino-w8a8": partial(paged, quantization="w8a8"),
    "openvino-w8a8-bf16": partial(paged, cache_type="bf16", quantization="w8a8"),
}


def table(found: dict[str, TextReading]) -> str:
    """A Markdown table with a row for each backend."""
    first = next(iter(found.values()))
    rows = [
        (
            name,
            f"{one.perplexity:.4g}",
            f"{one.perplexity / first.perplexity - 1:+.2%}",
            f"{one.agreement(first):.1%}",
        )
        for name, one in found.items()
    ]
    return benchmark.table(("backend", "perplexity", "to the first", "same token"), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Read, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.tune.perplexity", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--backends", type=list_of(choice(*BACKENDS)), default=tuple(KERNELS))
    parser.add_argument("--text", type=Path, default=None)
    parser.add_argument("--windows", type=number_between(1, 1000), default=16)
    parser.add_argument("--threads", type=number_between(1, 512), default=usable_cores())
    args = parser.parse_args(argv)
    text = quality.default_text() if args.text is None else args.text.read_text()
    try:
        found = {
            name: quality.read_windows(args.model, text, args.windows, args.threads, BACKENDS[name])
            for name in args.backends
        }
    except (ConfigError, ValueError) as error:
        sys.exit(str(error))
    n_tokens = len(next(iter(found.values())).choices)
    print(f"{args.model.name}, {n_tokens} tokens in {args.windows} windows\n\n{table(found)}")


if __name__ == "__main__":
    main()
