"""llama.cpp's DRY samplers, whose strings to stop at take long to find in a vocabulary.

Source: llama.cpp, `llama_sampler_init_dry` and `get_overlapping_token_sequences`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import llama_cpp

from serve_app.errors import InvalidRequestError
from serve_app.sampling import SamplingParams

MOST_OVERLAPS = 32_768
"""The most tokens that may overlap with a request's breakers, counted for each breaker. A copy of the
sampler takes longer the more they are, and the decoder thread makes a copy for each sequence."""
_MOST_KEPT = 16
_MOST_BYTES = 40  # llama.cpp reads so much of a breaker
_BASE = 1.75  # llama-server's default, which counts where a request asks for less than 1
_SEPARATOR = b"\xff"  # is in no text

_Key = tuple[float, float, int, int, tuple[bytes, ...]]


def last_n(n: int, n_ctx_slot: int) -> int:
    """The last tokens that a sampler looks at: all that there can be for -1, which llama.cpp does not read
    so."""
    return n_ctx_slot if n < 0 else min(n, n_ctx_slot)


class SharedSampler:
    """A sampler that no sequence uses itself. Any thread."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        weakref.finalize(self, llama_cpp.llama_sampler_free, pointer).atexit = False

    def copy(self) -> Any:
        """A sampler of llama.cpp's for one sequence, which whoever asked for it frees."""
        return llama_cpp.llama_sampler_clone(self._pointer)


class DrySamplers:
    """The samplers that are in use, and the last ones, by their parameters. Any thread."""

    def __init__(self, vocabulary: Any, all_pieces: Callable[[], list[bytes]]) -> None:
        """`all_pieces` gives the bytes of each token."""
        self._vocabulary = vocabulary
        self._all_pieces = all_pieces
        self._pieces: bytes | None = None
        self._making = threading.Lock()
        self._used = weakref.WeakValueDictionary[_Key, SharedSampler]()
        self._kept = OrderedDict[_Key, SharedSampler]()

    def sampler(self, params: SamplingParams, n_ctx_slot: int) -> SharedSampler:
        """The sampler for these parameters. A new one takes tenths of a second for a large vocabulary,
        mostly without the GIL. Raises InvalidRequestError if the breakers overlap with too many tokens."""
        texts = (text.encode()[:_MOST_BYTES] for text in params.dry_sequence_breakers)
        base = params.dry_base if params.dry_base >= 1 else _BASE
        breakers = tuple(dict.fromkeys(texts))
        n_last = last_n(params.dry_penalty_last_n, n_ctx_slot)
        key = params.dry_multiplier, base, params.dry_allowed_length, n_last, breakers
        sampler = self._used.get(key)  # without the lock, which may be held for long
        if sampler is None:
            with self._making:
                sampler = self._used.get(key) or self._made(key)
        return sampler

    def _made(self, key: _Key) -> SharedSampler:
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
        sampler = self._used[key] = self._kept[key] = SharedSampler(pointer)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return sampler

    def _n_overlaps(self, breaker: bytes) -> int:
        """The tokens that hold the breaker, and those that end as it begins."""
        if self._pieces is None:
            self._pieces = b"".join(piece + _SEPARATOR for piece in self._all_pieces())
        beginnings = (breaker[:n] + _SEPARATOR for n in range(1, len(breaker)))
        return self._pieces.count(breaker) + sum(map(self._pieces.count, beginnings))
