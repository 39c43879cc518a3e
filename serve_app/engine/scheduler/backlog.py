"""The backlog: seconds of work that are queued. Pure: no model, no threads, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.sequence import Sequence
from serve_app.routing.slot_wait import slot_wait_s

# Seconds of full slots after which the speed of before hardly counts any more.
_PACE_S = 10.0
# Generated tokens that a request is taken to have before any has ended, and the weight of the newest.
_FIRST_GUESS = 128.0
_NEWEST = 0.1


@dataclass(frozen=True, slots=True)
class Forecast:
    """The work at one moment, and how long more would take. Immutable: any thread."""

    n_slots: int
    prompt_token_s: float
    """Seconds of a prompt token, and of a generated one with all slots busy; 0 if nothing was measured."""
    token_s: float
    n_generated: float
    """Tokens that an answer has, as far as it does not say itself."""
    work_s: float = 0.0
    """Until all sequences of that moment have ended."""

    prefill_s: float = 0.0
    """Of it, what is missing of prompts."""

    def work_of(self, sequences: Iterable[Sequence]) -> float:
        """Seconds until these have ended, if there were no others."""
        return sum(self.parts_of(sequences))

    def parts_of(self, sequences: Iterable[Sequence]) -> tuple[float, float]:
        """The same: seconds for what is missing of prompts, and for answers."""
        n_prompt, n_left = 0, 0.0
        for sequence in sequences:
            n_prompt += max(0, sequence.n_pending - 1)
            likely = max(1.0, self.n_generated - sequence.n_generated)
            n_left += likely if sequence.n_left is None else min(likely, sequence.n_left)
        return n_prompt * self.prompt_token_s, n_left * self.token_s

    def wait_s(self, n_live: int, arrived: Iterable[Sequence]) -> float:
        """See `slot_wait_s`; of the `n_live` others, `arrived` are not in `work_s` yet."""
        return slot_wait_s(self.work_s + self.work_of(arrived), n_live, self.n_slots)

    def place_free_s(self, n_live: int, arrived: Iterable[Sequence]) -> int:
        """Whole seconds after which one of them should have ended, 1 at least."""
        return max(1, math.ceil((self.work_s + self.work_of(arrived)) / max(1, n_live)))


class Backlog:
    """Forecasts by the cost model, and by how long answers have been. Decoder thread only."""

    def __init__(self, costs: CostModel, n_slots: int) -> None:
        self._costs = costs
        self._n_slots = n_slots
        self._n_generated = _FIRST_GUESS
        self._pace = 1.0
        """Seconds of work, as measured at the start, that get done in a second with all slots busy."""

    def progressed(self, n_prompt: int, n_generated: int, seconds: float) -> None:
        """Learn how fast work gets done from a step with all slots busy: neighbours on the machine slow it
        down, and so do bounded stalls."""
        done_s = n_prompt * self._costs.prompt_token_s + n_generated * self._token_s
        if done_s > 0 and seconds > 0:
            weight = -math.expm1(-seconds / _PACE_S)
            self._pace += weight * (done_s / seconds - self._pace)

    @property
    def _token_s(self) -> float:
        return self._costs.steps_s(self._n_slots, 0) / self._n_slots

    def ended(self, sequence: Sequence) -> None:
        """Learn from an answer's length."""
        self._n_generated += _NEWEST * (sequence.n_generated - self._n_generated)

    def forecast(self, live: Iterable[Sequence]) -> Forecast:
        """With these sequences."""
        prompt_token_s, token_s = (
            seconds / self._pace for seconds in (self._costs.prompt_token_s, self._token_s)
        )
        rates = self._n_slots, prompt_token_s, token_s, self._n_generated
        prefill_s, answers_s = Forecast(*rates).parts_of(live)
        return Forecast(*rates, work_s=prefill_s + answers_s, prefill_s=prefill_s)
