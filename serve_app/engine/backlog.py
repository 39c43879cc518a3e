"""How much work there is, in seconds. Pure: no model, no threads, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable

from serve_app.engine.cost_model import CostModel
from serve_app.engine.sequence import Sequence

# Generated tokens that a request is taken to have before any has ended, and the weight of the newest.
_FIRST_GUESS = 128.0
_NEWEST = 0.1


class Backlog:
    """Forecasts by the cost model, and by how long answers have been. Decoder thread only."""

    def __init__(self, costs: CostModel, n_slots: int) -> None:
        self._costs = costs
        self._n_slots = n_slots
        self._n_generated = _FIRST_GUESS

    def ended(self, sequence: Sequence) -> None:
        """Learn from an answer's length."""
        self._n_generated += _NEWEST * (sequence.n_generated - self._n_generated)

    def seconds(self, live: Iterable[Sequence]) -> float:
        """Until all these sequences would have ended; 0 if nothing was measured."""
        n_prompt, n_left = 0, 0.0
        for sequence in live:
            n_prompt += max(0, sequence.n_pending - 1)
            likely = max(1.0, self._n_generated - sequence.n_generated)
            n_left += likely if sequence.n_left is None else min(likely, sequence.n_left)
        decode_s = self._costs.steps_s(self._n_slots, 0) / self._n_slots
        return n_prompt * self._costs.prompt_token_s + n_left * decode_s

    def place_free_s(self, live: list[Sequence]) -> int:
        """Whole seconds after which one of them should have ended, 1 at least: they end one by one."""
        return max(1, math.ceil(self.seconds(live) / max(1, len(live))))
