"""The context of a model's own prediction layers."""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp
import numpy as np

from serve_app.llama.context import Context, Row
from serve_app.llama.own_layers import hidden_states
from serve_app.llama.own_layers.hidden_states import States


class OwnLayersContext(Context):
    """Decodes rows of tokens and, for each, the hidden state of the token before. See `Context`."""

    _KIND = llama_cpp.LLAMA_CONTEXT_TYPE_MTP

    def decode(self, rows: Sequence[Row], states: States | None = None) -> None:
        """Decode rows with the hidden state of the token before each; without states, with zeros."""
        if states is None:
            states = np.zeros((len(rows), self.model.n_embd), np.float32)
        self._batch.embd = hidden_states.pointer_to(states)
        try:
            super().decode(rows)
        finally:
            self._batch.embd = None  # llama.cpp would free it with the batch
