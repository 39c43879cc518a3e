"""The quality of a format, by perplexity and by its next tokens; and files of other formats."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import ConfigError
from serve_app.base.formats import CacheType
from serve_app.cli.measure.benchmark import BenchmarkError
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.quantising import quantise

WINDOW = 256
"""Tokens that are read from nothing, one window after the other."""
LIMIT_S = 3600


@dataclass(frozen=True, slots=True)
class TextReading:
    """How a model reads a text. Positions are in the second half of each window, behind some text."""

    log_likelihood: float
    """The log-likelihood of all tokens that were read, in nats."""
    choices: tuple[int, ...]
    """The likeliest next token at each position."""

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood of a token."""
        return math.exp(-self.log_likelihood / len(self.choices))

    def agreement(self, other: TextReading) -> float:
        """The part of the positions at which both find the same token likeliest."""
        same = sum(a == b for a, b in zip(self.choices, other.choices, strict=True))
        return same / len(self.choices)


def default_text() -> str:
    """English prose and code that every machine has: what Python's own modules say of themselves."""
    import argparse
    import asyncio
    import collections
    import decimal
    import email.message
    import logging

    modules = (argparse, asyncio, collections, decimal, email.message, logging)
    return "\n\n".join(inspect.getsource(module) for module in modules)


ReadingContext = Callable[[Path, int], tuple[Model, Any]]
"""Opens a model with so many threads, and a context for one window."""


def read_windows(
    path: Path, text: str, n_windows: int, threads: int, opened: ReadingContext | None = None
) -> TextReading:
    """How the model reads the text's first windows, in a process of its own. Raises ValueError for a text
    of less than one window, and ConfigError for a model that cannot be opened."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(
            _read_in_process, path, text, n_windows, threads, opened or llama
        ).result()


def _read_in_process(
    path: Path, text: str, n_windows: int, threads: int, opened: ReadingContext
) -> TextReading:
    model, context = opened(path, threads)
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    first = model.tokenize("", add_special=True, parse_special=False)[:1]
    windows = split(tokens, first)
    likelihood, choices = 0.0, []
    with closing(context):
        for window in windows[:n_windows]:
            context.truncate(0, 0)
            context.decode([(token, i, 0, True) for i, token in enumerate(window)])
            rows = [context.logits(i) for i in range(WINDOW)]
            likelihood += window_likelihood(rows, window)
            choices += [int(row.argmax()) for row in rows[WINDOW // 2 : -1]]
    return TextReading(likelihood, tuple(choices))


def llama(path: Path, threads: int, cache_type: CacheType = "f16") -> tuple[Model, Context]:
    """The model and a context of llama.cpp, with keys and values of that format."""
    model = Model(path)
    options = ContextOptions(
        n_seq_max=1,
        n_ctx_slot=WINDOW,
        n_batch=WINDOW,
        n_outputs=WINDOW,
        threads=threads,
        flash_attn=True,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
    )
    return model, Context(model, options)


def split(tokens: Sequence[int], first: Sequence[int]) -> list[list[int]]:
    """The text's windows, each behind the token that the model wants at a text's beginning, if any. Raises
    ValueError for a text of less than one window."""
    size = WINDOW - len(first)
    if len(tokens) < size:
        raise ValueError(f"The text has {len(tokens)} tokens; at least {size} are needed.")
    return [[*first, *tokens[i : i + size]] for i in range(0, len(tokens) - size + 1, size)]


def window_likelihood(rows: Sequence[NDArray[np.float32]], window: Sequence[int]) -> float:
    """The log-likelihood of the window's second half, by the logits of each place's next token."""
    likelihood = 0.0
    for place in range(len(window) // 2, len(window) - 1):
        row = rows[place].astype(np.float64)
        top = row.max()
        likelihood += float(row[window[place + 1]] - top - math.log(np.exp(row - top).sum()))
    return likelihood


def target(source: Path, format_name: str, folder: Path) -> Path:
    """The path where the source's file of this format is or will be. The name tells path, size and
    time."""
    about = source.stat()
    identity = f"{source.resolve()}\0{about.st_size}\0{about.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return folder / f"{source.stem}-{digest}-{format_name}.gguf"


def quantised_file(source: Path, format_name: str, folder: Path, threads: int) -> Path:
    """The source's file of this format; made if it is not there yet. Raises BenchmarkError where llama.cpp
    cannot make it. Runs in a process of its own, as llama.cpp may end the one that asks."""
    made = target(source, format_name, folder)
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    part = made.with_suffix(f".{os.getpid()}.part")
    process = get_context("spawn").Process(
        target=_quantise, args=(source, part, format_name, threads)
    )
    try:
        process.start()
        process.join(LIMIT_S)
        if process.exitcode != 0:
            raise BenchmarkError(f"llama.cpp cannot make {format_name} of {source.name}.")
        part.rename(made)
    finally:
        if process.is_alive():
            process.kill()
        part.unlink(missing_ok=True)
    return made


def _quantise(source: Path, to: Path, format_name: str, threads: int) -> None:
    try:
        quantise(source, to, format_name, threads=threads)
    except ConfigError:
        os._exit(1)
    os._exit(0)
