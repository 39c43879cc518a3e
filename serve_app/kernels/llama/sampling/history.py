"""llama.cpp's samplers that look at a sequence's last tokens: penalties and DRY. Both take long to make.

DRY looks for its breakers in the whole vocabulary, and each sampler is told of the prompt's tokens, one by
one. So they are made once for all answers to a prompt, outside the thread that decodes, and copied there.

Source: llama.cpp, `llama_sampler_init_penalties`, `llama_sampler_init_dry` and
`get_overlapping_token_sequences`.
"""

from __future__ import annotations

import ctypes
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np

from serve_app.base.errors import InvalidRequestError
from serve_app.base.sampling import PARAMETERS, SamplingParams
from serve_app.kernels.llama import library
from serve_app.kernels.llama.shared import Shared

MOST_OVERLAPS = 32_768
"""The most tokens that may overlap with a request's breakers, counted for each breaker. A copy of the
sampler takes longer the more they are, and the decoder thread makes a copy for each sequence."""
_MOST_BREAKERS_KEPT, _MOST_HISTORIES_KEPT = 16, 4
_MOST_BYTES = 40  # llama.cpp reads so much of a breaker
_BASE = 1.75  # llama-server's default, which counts where a request asks for less than 1
_SEPARATOR = b"\xff"  # is in no text

# The thread that decodes may have the interpreter after so many tokens that a sampler was told of.
_TURN = 256
_READ = ("samplers", "mirostat", *(one.name for one in PARAMETERS if one.name.startswith("dry_")))
_READ += tuple(one.name for one in PARAMETERS if one.sampler == "penalties")
"""The parameters that decide which samplers there are, and what they do."""
_accept = library.brief(llama_cpp.llama_sampler_accept)

_Key = tuple[float, float, int, int, tuple[bytes, ...]]


class SharedSampler:
    """A sampler that no sequence uses itself. Any thread."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        weakref.finalize(self, llama_cpp.llama_sampler_free, pointer).atexit = False

    def copy(self) -> Any:
        """A sampler of llama.cpp's for one sequence, which whoever asked for it frees."""
        return llama_cpp.llama_sampler_clone(self._pointer)


class History(SharedSampler):
    """The samplers that look at the last tokens, as a chain that was told of a prompt's."""

    def __init__(self, chain: Any, last: Sequence[int]) -> None:
        super().__init__(chain)
        self.known = frozenset(last)
        """The tokens that the samplers look at."""
        self.tokens = np.array(sorted(self.known), np.intp)
        for start in range(0, len(last), _TURN):
            for token in itertools.islice(last, start, start + _TURN):
                _accept(chain, token)
            time.sleep(0)


class Histories:
    """The samplers that look at last tokens: those in use, and the last ones. Any thread."""

    def __init__(
        self, vocabulary: Any, n_vocab: int, all_pieces: Callable[[], list[bytes]]
    ) -> None:
        """`all_pieces` gives the bytes of each token."""
        self._vocabulary = vocabulary
        self._n_vocab = n_vocab
        self._all_pieces = all_pieces
        self._pieces: bytes | None = None
        self._breakers = Shared[_Key, SharedSampler](_MOST_BREAKERS_KEPT)
        self._histories = Shared[tuple[object, ...], History](_MOST_HISTORIES_KEPT)

    def history(
        self, params: SamplingParams, n_ctx_slot: int, prompt: Sequence[int]
    ) -> History | None:
        """The samplers for these parameters, told of this prompt; None if they would change nothing. New
        ones take 20 ms for 30,000 tokens, and tenths of a second for new breakers and a large vocabulary.
        Raises InvalidRequestError if the breakers overlap with too many tokens."""
        windows = [params.repeat_last_n] if params.penalises else []
        windows += [params.dry_penalty_last_n] if params.counts_repeats else []
        if not windows:
            return None
        words = (token for token in reversed(prompt) if token >= 0)  # and no pictures
        n_last = max(_last_n(n, n_ctx_slot) for n in windows)
        last = tuple(itertools.islice(words, n_last))[::-1]
        key = n_ctx_slot, *(getattr(params, name) for name in _READ), last
        return self._histories.get(key, lambda: self._make(params, n_ctx_slot, last))

    def _make(self, params: SamplingParams, n_ctx_slot: int, last: tuple[int, ...]) -> History:
        samplers = []
        if params.counts_repeats:  # first, as it may be refused
            samplers.append(self._dry(params, n_ctx_slot).copy())
        if params.penalises:
            penalties = llama_cpp.llama_sampler_init_penalties(
                self._n_vocab,
                _last_n(params.repeat_last_n, n_ctx_slot),
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            samplers.insert(0, penalties)
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for sampler in samplers:
            llama_cpp.llama_sampler_chain_add(chain, sampler)
        return History(chain, last)

    def _dry(self, params: SamplingParams, n_ctx_slot: int) -> SharedSampler:
        texts = (text.encode()[:_MOST_BYTES] for text in params.dry_sequence_breakers)
        base = params.dry_base if params.dry_base >= 1 else _BASE
        breakers = tuple(dict.fromkeys(texts))
        n_last = _last_n(params.dry_penalty_last_n, n_ctx_slot)
        key = params.dry_multiplier, base, params.dry_allowed_length, n_last, breakers
        return self._breakers.get(key, lambda: self._make_dry(key))

    def _make_dry(self, key: _Key) -> SharedSampler:
        breakers = key[-1]
        n_overlaps = sum(map(self._n_overlaps, breakers))
        if n_overlaps > MOST_OVERLAPS:
            raise InvalidRequestError(
                f"The strings overlap with {n_overlaps} tokens of the vocabulary, and {MOST_OVERLAPS} are "
                "the limit. Use fewer or rarer strings.",
                "dry_sequence_breakers",
            )
        pointer = llama_cpp.llama_sampler_init_dry(
            self._vocabulary, *key[:-1], (ctypes.c_char_p * len(breakers))(*breakers), len(breakers)
        )
        return SharedSampler(pointer)

    def _n_overlaps(self, breaker: bytes) -> int:
        """The tokens that hold the breaker, and those that end as it begins."""
        if self._pieces is None:
            self._pieces = b"".join(piece + _SEPARATOR for piece in self._all_pieces())
        beginnings = (breaker[:n] + _SEPARATOR for n in range(1, len(breaker)))
        return self._pieces.count(breaker) + sum(map(self._pieces.count, beginnings))


def _last_n(n: int, n_ctx_slot: int) -> int:
    """The last tokens that a sampler looks at: for -1 all that there can be, unlike llama.cpp's."""
    return n_ctx_slot if n < 0 else min(n, n_ctx_slot)
