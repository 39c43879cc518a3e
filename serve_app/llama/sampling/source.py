"""Where logits come from: llama.cpp's own context, or another one over the same vocabulary."""

from __future__ import annotations

from typing import Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.llama.model import Model


class LogitsSource(Protocol):
    """The methods that samplers need of a context. Used by the thread that owns it."""

    @property
    def model(self) -> Model:
        """The model, which has the vocabulary."""

    @property
    def n_ctx_slot(self) -> int:
        """Tokens of a sequence, at most."""

    def logits(self, row: int) -> NDArray[np.float32]:
        """The logits of a row of the last batch, by token id; see `serve_app.llama.context.Context.logits`.
        Samplers change them in their place."""

    def pick(self, sampler: llama_cpp.llama_sampler_p, row: int) -> int:
        """The token that llama.cpp's samplers pick by them; see `serve_app.llama.context.Context.pick`."""
