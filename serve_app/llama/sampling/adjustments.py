"""Logit bias and penalties, which change the logits of few tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.llama import library
from serve_app.llama.sampling.candidates import Candidates
from serve_app.llama.sampling.dry import last_n
from serve_app.llama.sampling.source import LogitsSource
from serve_app.sampling import SamplingParams

Logits = NDArray[np.float32]

_accept = library.brief(llama_cpp.llama_sampler_accept)


class Adjustments:
    """Changes one sequence's logits before any token is left out. Only the tokens that are concerned
    are looked at: those with a bias, and those that were among the last ones at any time.

    The penalties look at the prompt's last tokens too, as llama-server's do. Used by the thread that
    owns the context.
    """

    def __init__(
        self, context: LogitsSource, params: SamplingParams, prompt: Sequence[int]
    ) -> None:
        bias = _logit_bias(context, params)
        self._biased = np.array([token for token, _ in bias], np.intp)
        self._bias = np.array([value for _, value in bias], np.float32)
        self._tokens = np.unique(self._biased)
        self._has_twice = self._tokens.size < self._biased.size
        self._known = set(self._tokens.tolist())
        self._by_history = [
            one for one in (_penalties(context, params), _dry(context, params)) if one
        ]
        if self._by_history:
            for token in (last := prompt[-_window(context, params) :]):
                self._tell(token)
            self._concern(last)

    def __bool__(self) -> bool:
        """Whether any token is concerned yet."""
        return self._tokens.size > 0

    @contextmanager
    def made(self, logits: Logits) -> Iterator[None]:
        """The logits are changed in their place, and as they were at the end."""
        if not self:
            yield
            return
        tokens = self._tokens
        before = logits[tokens]
        try:
            if self._has_twice:
                np.add.at(logits, self._biased, self._bias)
            else:  # the same, sooner
                logits[self._biased] += self._bias
            if self._by_history:
                candidates = Candidates(tokens, logits[tokens])
                for one in self._by_history:
                    candidates.apply(one)
                logits[tokens] = candidates.logits
            yield
        finally:
            logits[tokens] = before

    def accept(self, token: int) -> None:
        """The token was picked: the penalties look at it from now on."""
        if self._by_history:
            self._tell(token)
            self._concern([token])

    def _tell(self, token: int) -> None:
        for one in self._by_history:
            _accept(one, token)

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


def _logit_bias(context: LogitsSource, params: SamplingParams) -> list[tuple[int, float]]:
    if not params.ignore_eos:
        return list(params.logit_bias)
    return [*params.logit_bias, *((token, -math.inf) for token in context.model.eog_tokens)]


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
