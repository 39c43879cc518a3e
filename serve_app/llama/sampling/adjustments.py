"""Logit bias and penalties, which change the logits of few tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.llama import library
from serve_app.llama.sampling.candidates import Candidates
from serve_app.llama.sampling.dry import SharedSampler, last_n
from serve_app.llama.sampling.source import LogitsSource
from serve_app.sampling import PARAMETERS, SamplingParams

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
        self._tokens = np.empty(0, np.intp)
        """The tokens that were among the last ones at any time."""
        self._known = set[int]()
        self._by_history = list[Any]()
        if params.penalises or params.counts_repeats:
            last = tuple(prompt[-_window(context, params) :])
            self._by_history = _told.copies(context, params, last)
            self._concern(last)

    def __bool__(self) -> bool:
        """Whether any token is concerned yet."""
        return bool(self._bias) or self._tokens.size > 0

    @contextmanager
    def made(self, logits: Logits) -> Iterator[None]:
        """The logits are changed in their place, and as they were at the end."""
        tokens = self._tokens
        with self._bias.added(logits):
            before = logits[tokens]
            try:
                if tokens.size:
                    candidates = Candidates(tokens, before)
                    for one in self._by_history:
                        candidates.apply(one)
                    logits[tokens] = candidates.logits
                yield
            finally:
                logits[tokens] = before

    def accept(self, token: int) -> None:
        """The token was picked: the penalties look at it from now on."""
        for sampler in self._by_history:
            _accept(sampler, token)
        if self._by_history:
            self._concern([token])

    def _concern(self, tokens: Sequence[int]) -> None:
        new = sorted(set(tokens) - self._known)
        if new:
            self._known.update(new)
            self._tokens = np.append(self._tokens, np.array(new, np.intp))

    def close(self) -> None:
        """Free llama.cpp's part. Idempotent."""
        for one in self._by_history:
            llama_cpp.llama_sampler_free(one)
        self._by_history = []


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

    @contextmanager
    def added(self, logits: Logits) -> Iterator[None]:
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


class _Told(threading.local):
    """The samplers that were told of the last long prompt. The next answer to it copies them: to tell them
    of 30,000 tokens takes 20 ms, and a request may have 32 answers. Each thread has its own."""

    def __init__(self) -> None:
        self._model: object = None
        self._key: tuple[object, ...] = ()
        self._samplers: list[SharedSampler] = []

    def copies(
        self, context: LogitsSource, params: SamplingParams, last: tuple[int, ...]
    ) -> list[Any]:
        """Samplers by these parameters for one sequence, told of these last tokens."""
        key = (context.n_ctx_slot, *(getattr(params, name) for name in _READ), last)
        if self._model is context.model and self._key == key:
            return [sampler.copy() for sampler in self._samplers]
        made = (_penalties(context, params), _dry(context, params))
        samplers = [sampler for sampler in made if sampler]
        for token in last:
            for sampler in samplers:
                _accept(sampler, token)
        if len(last) > _MANY_TOLD:
            clones = map(llama_cpp.llama_sampler_clone, samplers)
            self._model, self._key = context.model, key
            self._samplers = list(map(SharedSampler, clones))
        return samplers


_READ = ("samplers", "mirostat", *(one.name for one in PARAMETERS if one.name.startswith("dry_")))
_READ += tuple(one.name for one in PARAMETERS if one.sampler == "penalties")
"""The parameters that decide which samplers there are, and what they do."""
_MANY_TOLD = 1024
_told = _Told()


def _penalties(context: LogitsSource, params: SamplingParams) -> Any:
    """llama.cpp's sampler; None if it would change nothing."""
    if not params.penalises:
        return None
    return llama_cpp.llama_sampler_init_penalties(
        context.model.n_vocab,
        _last_n(context, params.repeat_last_n),
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def _dry(context: LogitsSource, params: SamplingParams) -> Any:
    """llama.cpp's sampler; None if it would change nothing."""
    if not params.counts_repeats:
        return None
    return context.model.dry_sampler(params, context.n_ctx_slot).copy()


def _window(context: LogitsSource, params: SamplingParams) -> int:
    """How many last tokens any of them looks at."""
    asked = [params.repeat_last_n] if params.penalises else []
    asked += [params.dry_penalty_last_n] if params.counts_repeats else []
    return max(_last_n(context, n) for n in asked)


def _last_n(context: LogitsSource, n: int) -> int:
    return last_n(n, context.n_ctx_slot)
