"""Picks one sequence's tokens, in the order of llama-server's samplers.

Source of the reasoning budget: llama.cpp, common/reasoning-budget.cpp.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import ConstraintError
from serve_app.base.sampling import ReasoningBudget, SamplingParams
from serve_app.base.values.answers import Sampled, TokenLogprobs
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.sampling import cuts
from serve_app.kernels.llama.sampling.adjustments import Adjustments
from serve_app.kernels.llama.sampling.candidates import LogitsSource
from serve_app.kernels.llama.sampling.chain import Chain

_MOST_HIGHEST = 1024
"""The most logits that are moved: to move more of the highest is hardly less work than to move all."""


class SequenceSampler:
    """Picks one sequence's tokens: logit bias, penalties, then greedy, or top_n_sigma, top_k,
    typical, top_p, min_p, temperature and a seeded draw.

    The tokens are those that llama.cpp's chain of samplers picks from the whole vocabulary: `cuts` says how
    it gets to see less. Used by the thread that owns the context.
    """

    def __init__(
        self,
        context: LogitsSource,
        params: SamplingParams,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        self._context = context
        self._constraint = constraint
        self._n_top = params.logprobs
        self._adjustments = Adjustments(context, params, prompt)
        self._chain = Chain(params, context.model)
        self._n_highest: int | None = None
        """The number of the highest logits that all tokens depend on; None for all, or many."""
        n_highest, n_lowered = self._chain.n_highest, self._adjustments.n_lowered
        is_free = constraint is None and params.logprobs is None
        if is_free and n_highest is not None and n_lowered is not None:
            n = n_highest + n_lowered
            self._n_highest = n if n <= _MOST_HIGHEST else None
        self._reasoning = (
            None
            if params.reasoning is None
            else ReasoningLimit(params.reasoning, prompt, context.model.piece)
        )

    def sample(self, row: int) -> Sampled:
        """The next token from the logits of the given row of the last decoded batch; the row must
        have asked for logits. The token becomes part of what the penalties look at. Raises
        ConstraintError if the grammar allows none."""
        token = self._next(row)
        self._adjustments.accept(token)
        self._chain.accept(token)
        constraint = self._constraint
        logprobs = None if self._n_top is None else self._likelihood(row, token, self._n_top)
        return Sampled(token, logprobs, constraint is not None and constraint.complete)

    def _next(self, row: int) -> int:
        if self._reasoning is None:
            return self._pick(row)
        token = self._reasoning.next
        if token is None or not (self._constraint is None or self._constraint.take(token)):
            token = self._pick(row)
        self._reasoning.accept(token)
        return token

    def _likelihood(self, row: int, token: int, n_top: int) -> TokenLogprobs:
        """The likelihood of the token: to be drawn, or by the model."""
        if self._chain.drawn is not None:
            return self._chain.drawn
        return _logprobs(self._context.logits(row), token, n_top)

    def score(self, row: int, token: int) -> TokenLogprobs:
        """The likelihood of that token by the logits of the given row, under the same conditions."""
        return _logprobs(self._context.logits(row), token, self._n_top or 0)

    def _pick(self, row: int) -> int:
        if self._constraint is None and not self._adjustments:
            return self._draw(row)
        logits = self._context.logits(row, self._n_highest)
        with self._adjustments.apply(logits):
            return self._pick_within(self._constraint, row) if self._constraint else self._draw(row)

    def _draw(self, row: int) -> int:
        """A token by the row's logits as they stand."""
        if self._chain.whole:
            return self._chain.pick_of_row(self._context, row)
        return self._chain.pick(self._context.logits(row, self._n_highest))

    def _pick_within(self, constraint: Constraint, row: int) -> int:
        """A token that the constraint allows, picked as llama-server does. Mostly the token that would be
        sampled anyway is allowed, and the whole vocabulary is only looked at when it is not. The
        distribution is the same."""
        token = self._draw(row)
        if not constraint.take(token):
            token = self._chain.pick(self._context.logits(row), constraint.token_mask())
            if not constraint.take(token):
                why = constraint.fault or "all that it allows is banned"
                raise ConstraintError(f"No token fits the grammar: {why}.")
        return token

    def close(self) -> None:
        """Free llama.cpp's samplers. Idempotent."""
        self._adjustments.close()
        self._chain.close()


class ReasoningLimit:
    """The place of one text in its reasoning. When the budget is used up and the last character is whole,
    tokens are given, and not picked, up to the end of the reasoning. Afterwards all is free. One thread at
    a time."""

    def __init__(
        self, budget: ReasoningBudget, tokens: Sequence[int], piece: Callable[[int], bytes]
    ) -> None:
        """`tokens` are the prompt, and the text so far."""
        self._budget = budget
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._n_left: int | None = budget.n_tokens if budget.is_open else None
        """Tokens of the budget; None before the reasoning."""
        self._forced: list[int] = []
        self._last: tuple[int, ...] = ()
        self._is_over = False
        for token in tokens[budget.n_prompt :]:
            self.accept(token)

    @property
    def next(self) -> int | None:
        """The token that must come; None if any may."""
        if self._is_over or self._n_left is None:
            return None
        if not self._forced:
            if self._n_left > 0 or self._utf8.getstate()[0]:
                return None
            self._forced = list(self._budget.forced)
        return self._forced[0]

    def accept(self, token: int) -> None:
        """The token is the next one of the text."""
        if self._is_over:
            return
        if token == self.next:
            self._forced.pop(0)
            self._is_over = not self._forced
            return
        budget = self._budget
        self._last = (*self._last, token)[-max(len(budget.opening), len(budget.closing)) :]
        if self._n_left is None:
            if self._ends_with(budget.opening):
                self._n_left, self._last = budget.n_tokens, ()
            return
        self._n_left -= 1
        self._utf8.decode(self._piece(token))
        self._is_over = self._ends_with(budget.closing)

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return self._last[-len(tokens) :] == tokens


def _logprobs(logits: NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Log-probabilities by the model's own distribution."""
    highest = logits.max()
    weights = logits - highest
    total = float(highest) + math.log(float(np.exp(weights, out=weights).sum(dtype=np.float64)))
    most_likely = _most_likely(logits, n_top)
    return TokenLogprobs(
        float(logits[token]) - total,
        tuple((int(one), float(logits[one]) - total) for one in most_likely),
    )


def _most_likely(logits: NDArray[np.float32], n: int) -> NDArray[np.intp]:
    """The n tokens with the highest logits, highest first."""
    likeliest = cuts.highest(logits, n)
    if n and (likeliest is None or likeliest[0].size < n):
        return np.argsort(-logits, kind="stable")[:n]
    return likeliest[0][:n] if likeliest else np.empty(0, np.intp)
