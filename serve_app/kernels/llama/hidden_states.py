"""A model's own prediction layers (MTP, "next n"), which guess further tokens by its hidden states."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp_ext
from numpy.typing import NDArray

from serve_app.base.formats import Row
from serve_app.kernels.llama.context import Context

States = NDArray[np.float32]


class HiddenStates:
    """The hidden states of the last `n_kept` tokens of each sequence, by place. One thread.

    Sequences whose tokens came otherwise than by computing, or moved, begin anew: what is not known is not
    guessed with.
    """

    def __init__(self, n_sequences: int, n_kept: int, n_embd: int) -> None:
        self._states = np.zeros((n_sequences, n_kept, n_embd), np.float32)
        self._known = [(0, 0)] * n_sequences
        self._n_kept = n_kept

    @property
    def n_bytes(self) -> int:
        return self._states.nbytes

    def add(self, rows: Sequence[tuple[int, int, int, bool]], states: States) -> None:
        """Take the states of computed rows, (token, place, sequence, …). Places of one sequence ascend."""
        begin = 0
        for i in range(1, len(rows) + 1):
            if i == len(rows) or rows[i][2] != rows[begin][2]:
                self._take(rows[begin][2], rows[begin][1], states[begin:i])
                begin = i

    def _take(self, seq_id: int, place: int, states: States) -> None:
        if seq_id >= len(self._known):
            return
        start, end = self._known[seq_id]
        if not start <= place <= end:
            start = place
        end = place + len(states)
        kept = states[-self._n_kept :]
        self._states[seq_id, np.arange(end - len(kept), end) % self._n_kept] = kept
        self._known[seq_id] = max(start, end - self._n_kept), end

    def first_fed(self, seq_id: int) -> int:
        """The first place that can be fed: with the state of the one before, or as the first of all. Where
        nothing is known, it is behind every text."""
        start, end = self._known[seq_id]
        return sys.maxsize if start == end else start + 1 if start else 0

    def before(self, seq_id: int, place: int) -> States:
        """The state that is fed with the token at that place; zeros at 0."""
        if place == 0:
            return np.zeros_like(self._states[0, 0])
        states: States = self._states[seq_id, (place - 1) % self._n_kept]
        return states

    def cut(self, seq_id: int, n_past: int) -> None:
        """The sequence has its first `n_past` tokens only."""
        if seq_id < len(self._known):
            start, end = self._known[seq_id]
            self._known[seq_id] = (start, min(end, n_past)) if n_past > start else (n_past, n_past)

    def forget(self, seq_id: int) -> None:
        """Forget the sequence's states: its tokens are others now, or stand elsewhere."""
        if seq_id < len(self._known):
            self._known[seq_id] = 0, 0


class OwnLayersContext(Context):
    """A context of a model's own prediction layers. It decodes rows of tokens and, for each, the hidden
    state of the token before. See `Context`.

    Some of llama.cpp's graphs have states and logits for all rows, others for rows that want them. So of a
    pass, all rows want them, or none.
    """

    _KIND = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
    # Of so many rows, all have logits, so that one pass is enough.
    _MOST = 16

    def decode(self, rows: Sequence[Row], states: States | None = None) -> None:
        """Decode rows with the state of the token before each; without states, with zeros."""
        if states is None:
            states = np.zeros((len(rows), self.n_hidden), np.float32)
        wanted = list(range(len(rows)))
        if len(rows) > self._MOST:
            wanted = [i for i, row in enumerate(rows) if row[3]]
            others = [i for i, row in enumerate(rows) if not row[3]]
            if others:
                self._pass([rows[i] for i in others], states[others])
        self._at = {i: n for n, i in enumerate(wanted)}
        if wanted:
            self._pass([(*rows[i][:3], True) for i in wanted], states[wanted])

    def _pass(self, rows: Sequence[Row], states: States) -> None:
        self._batch.embd = states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        try:
            super().decode(rows)
        finally:
            self._batch.embd = None  # llama.cpp would free it with the batch

    def logits(self, row: int, n_highest: int | None = None) -> NDArray[np.float32]:
        return super().logits(self._at[row], n_highest)

    def state(self, row: int) -> States:
        """The state of a row with logits, for the token behind it. A view, until the next `decode`."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn_ith(self.pointer, self._at[row])
        return np.ctypeslib.as_array(pointer, shape=(self.n_hidden,))
