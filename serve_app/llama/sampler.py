"""One sequence's chain of llama.cpp samplers, in llama-server's order."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.errors import ConstraintError
from serve_app.llama.constraint import Constraint
from serve_app.llama.context import Context
from serve_app.sampling import SamplingParams
from serve_app.types import Sampled, TokenLogprobs

# llama.cpp reads this seed as "draw one"; ours are always explicit.
_RANDOM_SEED = 0xFFFFFFFF
# llama.cpp's `llama_token_data`.
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Sampler:
    """Picks one sequence's tokens: logit bias, penalties, then greedy, or top_n_sigma, top_k,
    typical, top_p, min_p, temperature and a seeded draw.

    The penalties look at the prompt's last tokens too, as llama-server's do. Used by the thread that
    owns the context.
    """

    def __init__(
        self,
        context: Context,
        params: SamplingParams,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        self._context = context
        self._constraint = constraint
        self._n_top = params.logprobs
        self._chain = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        for sampler in _links(context, params):
            llama_cpp.llama_sampler_chain_add(self._chain, sampler)
        if _penalises(params):
            for token in prompt[-_penalty_window(context, params) :]:
                llama_cpp.llama_sampler_accept(self._chain, token)

    def sample(self, row: int) -> Sampled:
        """The next token from the logits of the given row of the last decoded batch; the row must
        have asked for logits. The token becomes part of what the penalties look at. Raises
        ConstraintError if the grammar allows none."""
        constraint = self._constraint
        if constraint is None:
            token = int(llama_cpp.llama_sampler_sample(self._chain, self._context.pointer, row))
        else:
            token = self._sample_within(constraint, self._context.logits(row))
        logprobs = None
        if self._n_top is not None:
            logprobs = _logprobs(self._context.logits(row), token, self._n_top)
        return Sampled(token, logprobs, constraint is not None and constraint.complete)

    def score(self, row: int, token: int) -> TokenLogprobs:
        """How likely that token was by the logits of the given row, under the same conditions."""
        return _logprobs(self._context.logits(row), token, self._n_top or 0)

    def _sample_within(self, constraint: Constraint, logits: NDArray[np.float32]) -> int:
        """As llama-server does: mostly the token that would be sampled anyway is allowed, and the whole
        vocabulary is only looked at when it is not. The distribution is the same."""
        token = self._pick(logits)
        if not constraint.take(token):
            token = self._pick(np.where(constraint.allowed(), logits, np.float32(-np.inf)))
            if not constraint.take(token):
                why = constraint.fault or "all that it allows is banned"
                raise ConstraintError(f"No token fits the grammar: {why}.")
        llama_cpp.llama_sampler_accept(self._chain, token)
        return token

    def _pick(self, logits: NDArray[np.float32]) -> int:
        """What the chain picks from these logits; it does not count as picked yet."""
        candidates = np.zeros(logits.size, _CANDIDATE)
        candidates["id"] = np.arange(logits.size, dtype=np.int32)
        candidates["logit"] = logits
        data = candidates.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data, logits.size, -1, False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def close(self) -> None:
        """Free the chain. Idempotent."""
        if self._chain:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None


def _logprobs(logits: NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Of the model's own distribution."""
    highest = float(logits.max())
    total = highest + math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))
    most_likely = np.argpartition(-logits, min(n_top, logits.size - 1))[:n_top]
    ordered = most_likely[np.argsort(-logits[most_likely], kind="stable")]
    return TokenLogprobs(
        float(logits[token]) - total,
        tuple((int(one), float(logits[one]) - total) for one in ordered),
    )


def _links(context: Context, params: SamplingParams) -> list[llama_cpp.llama_sampler_p]:
    links = []
    n_vocab = context.model.n_vocab
    bias = _logit_bias(context, params)
    if bias:
        entries = (llama_cpp.llama_logit_bias * len(bias))(
            *(llama_cpp.llama_logit_bias(token, value) for token, value in bias)
        )
        links.append(llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(bias), entries))
    if _penalises(params):
        links.append(
            llama_cpp.llama_sampler_init_penalties(
                n_vocab,
                _penalty_window(context, params),
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        )
    if params.temperature <= 0:
        return [*links, llama_cpp.llama_sampler_init_greedy()]
    if params.top_n_sigma > 0:
        links.append(llama_cpp.llama_sampler_init_top_n_sigma(params.top_n_sigma))
    if params.top_k > 0:
        links.append(llama_cpp.llama_sampler_init_top_k(params.top_k))
    if params.typical_p < 1:
        links.append(llama_cpp.llama_sampler_init_typical(params.typical_p, 1))
    if params.top_p < 1:
        links.append(llama_cpp.llama_sampler_init_top_p(params.top_p, 1))
    if params.min_p > 0:
        links.append(llama_cpp.llama_sampler_init_min_p(params.min_p, 1))
    links.append(llama_cpp.llama_sampler_init_temp(params.temperature))
    links.append(llama_cpp.llama_sampler_init_dist(_seed(params)))
    return links


def _logit_bias(context: Context, params: SamplingParams) -> list[tuple[int, float]]:
    if not params.ignore_eos:
        return list(params.logit_bias)
    return [*params.logit_bias, *((token, -math.inf) for token in context.model.eog_tokens)]


def _penalises(params: SamplingParams) -> bool:
    return params.repeat_last_n != 0 and (
        params.repeat_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    )


def _penalty_window(context: Context, params: SamplingParams) -> int:
    """How many last tokens count: all that there can be for -1, which llama.cpp does not read so."""
    if params.repeat_last_n < 0:
        return context.n_ctx_slot
    return min(params.repeat_last_n, context.n_ctx_slot)


def _seed(params: SamplingParams) -> int:
    """A 32-bit seed. OpenAI's are 64-bit and may be negative: they are reduced, not refused."""
    seed = random.getrandbits(32) if params.seed is None else params.seed
    return seed % _RANDOM_SEED
