"""The quality of a format: perplexity, and how often its next token is the original's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serve_app.engine.options import KernelsName
from serve_app.folders import cache_folder
from serve_app.llama.context import Context, ContextOptions
from serve_app.llama.model import Model

if TYPE_CHECKING:
    from serve_app.openvino.paged.compiling import CacheType
    from serve_app.openvino.paged.context import PagedContext

WINDOW = 256
"""Tokens that are read from nothing, one window after the other."""


@dataclass(frozen=True, slots=True)
class TextReading:
    """How a model reads a text. Positions are those of the second half of each window, where it has seen
    some text before."""

    log_likelihood: float
    """The log-likelihood of all tokens that were read, in nats."""
    choices: tuple[int, ...]
    """The likeliest next token at each position."""

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood of a token."""
        return math.exp(-self.log_likelihood / len(self.choices))

    def agreement(self, other: TextReading) -> float:
        """At which part of the positions both find the same token likeliest."""
        same = sum(a == b for a, b in zip(self.choices, other.choices, strict=True))
        return same / len(self.choices)


def default_text() -> str:
    """English prose and code that every machine has: what Python's own modules say of themselves."""
    import argparse as _argparse
    import asyncio
    import collections
    import decimal
    import email.message
    import logging

    modules = (_argparse, asyncio, collections, decimal, email.message, logging)
    return "\n\n".join(inspect.getsource(module) for module in modules)


@dataclass(frozen=True, slots=True)
class Kernels:
    """With what a text is read."""

    backend: KernelsName = "llama.cpp"
    cache_type: CacheType = "f16"
    """The format of keys and values."""


def read(
    path: Path, text: str, n_windows: int, threads: int, kernels: Kernels = Kernels()
) -> TextReading:
    """How the model reads the text's first windows, in a process of its own. Raises ValueError for a text
    of less than one window, and ConfigError for a model that the backend cannot read."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_read, path, text, n_windows, threads, kernels).result()


def _read(path: Path, text: str, n_windows: int, threads: int, kernels: Kernels) -> TextReading:
    """Over there."""
    is_paged = kernels.backend == "openvino"
    model = Model(path, vocab_only=is_paged)
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    first = model.tokenize("", add_special=True, parse_special=False)[:1]
    windows = split(tokens, first)
    context = (_paged if is_paged else _llama)(model, threads, kernels)
    likelihood, choices = 0.0, []
    try:
        for window in windows[:n_windows]:
            context.truncate(0, 0)
            context.decode([(token, i, 0, True) for i, token in enumerate(window)])
            rows = [context.logits(i) for i in range(WINDOW)]
            likelihood += window_likelihood(rows, window)
            choices += [int(row.argmax()) for row in rows[WINDOW // 2 : -1]]
    finally:
        context.close()
    return TextReading(likelihood, tuple(choices))


def _llama(model: Model, threads: int, kernels: Kernels) -> Context:
    return Context(
        model,
        ContextOptions(
            n_seq_max=1,
            n_ctx_slot=WINDOW,
            n_batch=WINDOW,
            n_outputs=WINDOW,
            threads=threads,
            flash_attn=True,
            cache_type_k=kernels.cache_type,
            cache_type_v=kernels.cache_type,
        ),
    )


def _paged(model: Model, threads: int, kernels: Kernels) -> PagedContext:
    return paged_context(model, WINDOW, threads, kernels.cache_type)


def paged_context(model: Model, n_ctx: int, threads: int, cache_type: CacheType) -> PagedContext:
    """OpenVINO's context for one sequence of so many tokens, warmed up. The model is converted where an
    engine would do so, and needs its vocabulary only. Raises ConfigError."""
    from serve_app.openvino.convert import converted  # needs corral[openvino]
    from serve_app.openvino.folder import ConvertedModels
    from serve_app.openvino.paged.blocks import BLOCK
    from serve_app.openvino.paged.context import PagedContext, PagedOptions

    models = ConvertedModels(cache_folder() / "openvino")
    context = PagedContext(
        converted(model.files, model.fingerprint(), models),
        model,
        PagedOptions(
            n_sequences=1,
            n_ctx_slot=n_ctx,
            n_blocks=-(-n_ctx // BLOCK),
            threads=threads,
            cache_type=cache_type,
        ),
    )
    context.warm_up()
    return context


def split(tokens: Sequence[int], first: Sequence[int]) -> list[list[int]]:
    """The text's windows, each behind the token that the model wants at a text's beginning, if any. Raises
    ValueError for a text of less than one window."""
    size = WINDOW - len(first)
    if len(tokens) < size:
        raise ValueError(f"The text has {len(tokens)} tokens; at least {size} are needed.")
    return [[*first, *tokens[i : i + size]] for i in range(0, len(tokens) - size + 1, size)]


def window_likelihood(rows: Sequence[NDArray[np.float32]], window: Sequence[int]) -> float:
    """The log-likelihood of the window's second half, by the logits of each place's next token."""
    found = 0.0
    for place in range(len(window) // 2, len(window) - 1):
        row = rows[place].astype(np.float64)
        top = row.max()
        found += float(row[window[place + 1]] - top - math.log(np.exp(row - top).sum()))
    return found
