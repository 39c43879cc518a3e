"""Logit bias and penalties, which change the logits of few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.base.sampling import SamplingParams
from serve_app.kernels.llama import library
from serve_app.kernels.llama.sampling.candidates import Candidates, LogitsSource

Logits = NDArray[np.float32]

_MANY = 1 / 16
"""The part of the vocabulary from which on a bias is added to all of it."""
_accept = library.brief(llama_cpp.llama_sampler_accept)


class Adjustments:
    """Changes one sequence's logits before any token is left out. Penalties look only at the tokens that
    were among the last ones at any time.

    The penalties look at the prompt's last tokens too, as llama-server's do. Used by the thread that
    owns the context.
    """

    def __init__(
        self, context: LogitsSource, params: SamplingParams, prompt: Sequence[int]
    ) -> None:
        self._bias = _Bias(context, params)
        history = context.model.history(params, context.n_ctx_slot, prompt)
        self._by_history: Any = None if history is None else history.copy()
        self._tokens = np.empty(0, np.intp) if history is None else history.tokens
        """The tokens that were among the last ones at any time."""
        self._known = set[int]() if history is None else set(history.known)

    def __bool__(self) -> bool:
        """Whether any token is concerned yet."""
        return bool(self._bias) or self._tokens.size > 0

    @property
    def n_lowered(self) -> int | None:
        """The number of tokens whose logits are lowered. None if some are raised, or it changes with the
        text."""
        return None if self._by_history is not None else self._bias.n_lowered

    @contextmanager
    def apply(self, logits: Logits) -> Iterator[None]:
        """The logits are changed in their place, and as they were at the end."""
        tokens = self._tokens
        with self._bias.add(logits):
            before = logits[tokens]
            try:
                if tokens.size:
                    candidates = Candidates(tokens, before)
                    candidates.apply(self._by_history)
                    logits[tokens] = candidates.logits
                yield
            finally:
                logits[tokens] = before

    def accept(self, token: int) -> None:
        """The token was picked: the penalties look at it from now on."""
        if self._by_history is None:
            return
        _accept(self._by_history, token)
        if token not in self._known:
            self._known.add(token)
            self._tokens = np.append(self._tokens, token)

    def close(self) -> None:
        """Free llama.cpp's part. Idempotent."""
        if self._by_history is not None:
            llama_cpp.llama_sampler_free(self._by_history)
        self._by_history = None


class _Bias:
    """The request's logit bias, and the ban of tokens that end a text."""

    def __init__(self, context: LogitsSource, params: SamplingParams) -> None:
        self._where: NDArray[np.intp] | slice = np.empty(0, np.intp)
        self._values = np.empty(0, np.float32)
        self._is_empty = not (params.logit_bias.ids or params.ignore_eos)
        if self._is_empty:
            return
        values = np.zeros(context.model.n_vocab, np.float32)
        values[params.logit_bias.tokens] = params.logit_bias.values
        if params.ignore_eos:
            values[list(context.model.eog_tokens)] = -np.inf
        self._where = np.flatnonzero(values)
        if self._where.size > _MANY * values.size:  # to add all is sooner than to choose some
            self._where = slice(None)
        self._values = values[self._where]

    def __bool__(self) -> bool:
        return not self._is_empty

    @property
    def n_lowered(self) -> int | None:
        return None if (self._values > 0).any() else self._values.size

    @contextmanager
    def add(self, logits: Logits) -> Iterator[None]:
        """The logits with the values added, in their place, and as they were at the end."""
        if self._is_empty:
            yield
            return
        before = logits[self._where].copy()
        logits[self._where] += self._values
        try:
            yield
        finally:
            logits[self._where] = before
