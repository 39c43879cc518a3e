"""Candidates for the next token, as llama.cpp's samplers take them, and where their logits come from."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.base.values.answers import TokenLogprobs
from serve_app.kernels.llama import library
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.sampling import cuts

# llama.cpp's `llama_token_data`.
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_POINTER = ctypes.POINTER(llama_cpp.llama_token_data)
_apply_to_few = library.brief(llama_cpp.llama_sampler_apply)


class LogitsSource(Protocol):
    """The methods that samplers need of a context. Used by the thread that owns it."""

    @property
    def model(self) -> Model:
        """The model, which has the vocabulary."""

    @property
    def n_ctx_slot(self) -> int:
        """Tokens of a sequence, at most."""

    def logits(self, row: int, n_highest: int | None = None) -> NDArray[np.float32]:
        """The logits of a row of the last batch, by token id, which samplers change in their place. Only
        the `n_highest` need be there, if that is not None: a context may have -inf for others."""

    def pick(self, sampler: llama_cpp.llama_sampler_p, row: int) -> int:
        """The token that llama.cpp's samplers pick by them; see `Context.pick`."""


class Room:
    """Memory for candidates: to make it takes longer than to fill it with a few."""

    def __init__(self, size: int) -> None:
        entries = np.empty(size, _CANDIDATE)
        self.size = size
        self.ids: NDArray[np.int32] = entries["id"]
        self.logits: NDArray[np.float32] = entries["logit"]
        self.data: Any = ctypes.cast(entries.ctypes.data, _POINTER)
        self.array = llama_cpp.llama_token_data_array()


class Candidates:
    """Tokens and their logits, which samplers change, order and drop in their place."""

    def __init__(
        self,
        tokens: NDArray[np.intp],
        logits: NDArray[np.float32],
        *,
        ordered: bool = False,
        room: Room | None = None,
    ) -> None:
        """`ordered` if the highest logits come first. A few lie in `room` until others do."""
        n = tokens.size
        self._n = n
        self._room = room = room if room and n <= room.size else Room(n)
        room.ids[:n] = tokens
        room.logits[:n] = logits
        self._array = room.array
        self._array.data, self._array.size = room.data, n
        self._array.selected, self._array.sorted = -1, ordered

    def apply(self, sampler: llama_cpp.llama_sampler_p) -> None:
        """Let a sampler, or a chain of them, work on what is left."""
        are_few = self._array.size <= cuts.SMALL
        apply = _apply_to_few if are_few else llama_cpp.llama_sampler_apply
        apply(sampler, ctypes.byref(self._array))

    @property
    def logits(self) -> NDArray[np.float32]:
        """The logits, in the order of the tokens as long as nothing was ordered or dropped."""
        return self._room.logits[: self._n]

    def logprobs(self, n_top: int) -> TokenLogprobs:
        """The likelihood with which the picked token was drawn, and the `n_top` likeliest that could be."""
        data: Any = self._array.data
        first, n_bytes = ctypes.addressof(data.contents), self._array.size * _CANDIDATE.itemsize
        left = np.frombuffer(ctypes.string_at(first, n_bytes), _CANDIDATE)
        shares = left["p"].astype(np.float64)
        n = min(n_top, shares.size)
        least = np.partition(shares, -n)[-n] if n else np.inf
        likeliest = np.flatnonzero((shares >= least) & (shares > 0))
        likeliest = likeliest[np.argsort(-shares[likeliest], kind="stable")][:n]
        top = zip(left["id"][likeliest].tolist(), np.log(shares[likeliest]).tolist(), strict=True)
        share = shares[self._array.selected]
        return TokenLogprobs(math.log(share) if share > 0 else -math.inf, tuple(top))

    @property
    def picked_token(self) -> int:
        return int(self._array.data[self._array.selected].id)  # some samplers move the beginning
