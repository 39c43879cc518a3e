"""Candidates for the next token, as llama.cpp's samplers take them."""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.llama import cuts, library

# llama.cpp's `llama_token_data`.
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_POINTER = ctypes.POINTER(llama_cpp.llama_token_data)
_apply_to_few = library.brief(llama_cpp.llama_sampler_apply)


class Candidates:
    """Tokens and their logits, which samplers change, order and drop in their place."""

    def __init__(
        self, tokens: NDArray[np.intp], logits: NDArray[np.float32], *, ordered: bool = False
    ) -> None:
        """`ordered` if the highest logits come first."""
        self._entries = np.empty(tokens.size, _CANDIDATE)
        self._entries["id"] = tokens
        self._entries["logit"] = logits
        data = ctypes.cast(self._entries.ctypes.data, _POINTER)
        self._array = llama_cpp.llama_token_data_array(data, tokens.size, -1, ordered)

    def apply(self, sampler: llama_cpp.llama_sampler_p) -> None:
        """Let a sampler, or a chain of them, work on what is left."""
        are_few = self._array.size <= cuts.SMALL
        apply = _apply_to_few if are_few else llama_cpp.llama_sampler_apply
        apply(sampler, ctypes.byref(self._array))

    @property
    def logits(self) -> NDArray[np.float32]:
        """The logits, in the order of the tokens as long as nothing was ordered or dropped."""
        logits: NDArray[np.float32] = self._entries["logit"]
        return logits

    @property
    def picked(self) -> int:
        """The token that the last sampler picked."""
        return int(self._entries["id"][self._array.selected])
