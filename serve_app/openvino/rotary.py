"""Rotary embeddings: how far each pair of dimensions turns with a position. As in llama.cpp.

Sources: "RoFormer" (Su et al., 2021); "YaRN: Efficient Context Window Extension of Large Language Models"
(Peng et al., 2023), section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True, slots=True)
class Rotary:
    """A model's rotary embedding."""

    head_size: int
    base: float = 10000.0
    scaling: str = "linear"
    """"none", "linear" or "yarn"."""
    factor: float = 1.0
    """How much longer than in training contexts may be."""
    n_ctx_train: int = 0
    attention_factor: float = 1.0

    def frequencies(self, factors: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Radians for each position, of each pair of dimensions. `factors` divide them, as Llama 3.1's."""
        pairs = np.arange(0, self.head_size, 2) / self.head_size
        radians = self.base**-pairs
        if factors is not None:
            radians = radians / factors
        if self.scaling != "none":
            kept = self._ramp() if self.scaling == "yarn" else 0.0
            radians = radians * ((1 - kept) / self.factor + kept)
        return radians.astype(np.float32)

    @property
    def attention_scale(self) -> float:
        """The factor of scores. llama.cpp has a part of it in queries and keys."""
        mscale = self.attention_factor
        if self.scaling == "yarn" and self.factor > 1:
            mscale *= 1 + 0.1 * math.log(self.factor)
        return mscale**2 / math.sqrt(self.head_size)

    def _ramp(self) -> NDArray[np.float64]:
        """1 where a pair turns often in the context of training, and is left alone; 0 where it does not."""
        low = max(0, math.floor(self._dimension(_BETA_FAST)))
        high = min(self.head_size - 1, math.ceil(self._dimension(_BETA_SLOW)))
        at = np.arange(self.head_size // 2)
        return 1 - np.clip((at - low) / max(0.001, high - low), 0, 1)

    def _dimension(self, n_turns: float) -> float:
        """The pair that turns so often in the context of training."""
        turns = self.n_ctx_train / (n_turns * 2 * math.pi)
        return self.head_size * math.log(turns) / (2 * math.log(self.base))
