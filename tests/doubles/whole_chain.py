"""llama.cpp's own chain of samplers over the whole vocabulary: what Corral's picks are compared with."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.engine import SamplingParams

_MOST_SORTED = 16_384
_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class WholeChain:
    """One sequence's samplers as llama-server chains them, but `typical` gets 16,384 candidates at most.
    `params` has a 32-bit seed, and `window` is how many last tokens the penalties look at."""

    def __init__(
        self,
        n_vocab: int,
        params: SamplingParams,
        prompt: Sequence[int],
        window: int,
        *,
        ordered: bool = False,
    ) -> None:
        """With `ordered`, all tokens are sorted before they are cut. Sums of floats then differ in their
        last bits."""
        self.pointer = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        order = [llama_cpp.llama_sampler_init_top_k(n_vocab)] if ordered else []
        for link in (*_adjusting(n_vocab, params, window), *order, *_drawing(n_vocab, params)):
            llama_cpp.llama_sampler_chain_add(self.pointer, link)
        for token in prompt[-window:]:
            llama_cpp.llama_sampler_accept(self.pointer, token)

    def pick(self, logits: NDArray[np.float32]) -> int:
        """A token by these logits, which the penalties look at from now on."""
        token = self.draw(logits)
        self.accept(token)
        return token

    def draw(self, logits: NDArray[np.float32]) -> int:
        """A token by these logits."""
        entries = np.zeros(logits.size, _ENTRY)
        entries["id"], entries["logit"] = np.arange(logits.size), logits
        data = entries.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data, logits.size, -1, False)
        llama_cpp.llama_sampler_apply(self.pointer, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def accept(self, token: int) -> None:
        """The penalties look at it from now on."""
        llama_cpp.llama_sampler_accept(self.pointer, token)

    def close(self) -> None:
        """Free the samplers."""
        llama_cpp.llama_sampler_free(self.pointer)


def _adjusting(
    n_vocab: int, params: SamplingParams, window: int
) -> Iterator[llama_cpp.llama_sampler_p]:
    given = params.logit_bias
    pairs = zip(given.tokens.tolist(), given.values.tolist(), strict=True)
    bias = [llama_cpp.llama_logit_bias(token, value) for token, value in pairs]
    entries = (llama_cpp.llama_logit_bias * len(bias))(*bias)
    yield llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(bias), entries)
    yield llama_cpp.llama_sampler_init_penalties(
        n_vocab, window, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
    )


def _drawing(n_vocab: int, params: SamplingParams) -> Iterator[llama_cpp.llama_sampler_p]:
    if params.temperature <= 0:
        yield llama_cpp.llama_sampler_init_greedy()
        return
    yield llama_cpp.llama_sampler_init_top_n_sigma(params.top_n_sigma)
    yield llama_cpp.llama_sampler_init_top_k(params.top_k)
    if params.typical_p < 1 and n_vocab > _MOST_SORTED:
        yield llama_cpp.llama_sampler_init_top_k(_MOST_SORTED)
    yield llama_cpp.llama_sampler_init_typical(params.typical_p, 1)
    yield llama_cpp.llama_sampler_init_top_p(params.top_p, 1)
    yield llama_cpp.llama_sampler_init_min_p(params.min_p, 1)
    yield llama_cpp.llama_sampler_init_temp(params.temperature)
    yield llama_cpp.llama_sampler_init_dist(params.seed or 0)
