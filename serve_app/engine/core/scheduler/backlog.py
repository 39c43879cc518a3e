"""The backlog: seconds of work that are queued. Pure: no model, no threads, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.core.sequence import Sequence
from serve_app.routing.score import slot_wait_s

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
    """Seconds until all sequences of that moment have ended, but for those in the background."""

    prefill_s: float = 0.0
    """The part of `work_s` that is missing of prompts."""
    work_by_client: Mapping[str, float] = field(default_factory=dict)
    """The work of each account: of clients, and of what each has in the background."""
    background_s: float = 0.0

    def parts_of(self, sequences: Iterable[Sequence]) -> tuple[float, float]:
        """Seconds for what is missing of these sequences' prompts, and for their answers."""
        n_prompt, answers_s = 0, 0.0
        for sequence in sequences:
            n_prompt += max(0, sequence.n_pending - 1)
            likely = max(1.0, self.n_generated - sequence.n_generated)
            n_left = likely if sequence.n_left is None else min(likely, sequence.n_left)
            answers_s += n_left * (self.token_s + sequence.sampling_cost.token_s)
        return n_prompt * self.prompt_token_s, answers_s

    def wait_s(self, client: str, live: Mapping[str, int], arrived: Iterable[Sequence]) -> float:
        """Seconds that the client's next request waits for a slot, as clients take turns: behind all its
        own, and as many of each other client, and one more. `live` are requests by client; of them,
        `arrived` are not in `work_s` yet."""
        n_turns = live.get(client, 0) + 1
        n_ahead = {other: min(n, n_turns) for other, n in live.items()}
        work_s = self._part_s(n_ahead, live, arrived)
        return slot_wait_s(work_s, sum(n_ahead.values()), self.n_slots)

    def place_free_s(
        self, client: str, live: Mapping[str, int], arrived: Iterable[Sequence]
    ) -> int:
        """Whole seconds, at least 1, until a request of the client should have ended, or anybody's."""
        n_own = live.get(client) or max(live.values(), default=1)
        n_ahead = {other: min(n, n_own) for other, n in live.items()}
        n_ends = n_own if client in live else sum(n_ahead.values())
        return max(1, math.ceil(self._part_s(n_ahead, live, arrived) / max(1, n_ends)))

    def _part_s(
        self, counts: Mapping[str, int], live: Mapping[str, int], arrived: Iterable[Sequence]
    ) -> float:
        """The work of so many requests of each client, of those that are live."""
        work = dict(self.work_by_client)
        for sequence in arrived:
            client = sequence.request.account
            work[client] = work.get(client, 0.0) + sum(self.parts_of([sequence]))
        return sum(work.get(client, 0.0) * n / live[client] for client, n in counts.items())


class Backlog:
    """Forecasts by the cost model, and by how long answers have been. Decoder thread only."""

    def __init__(self, costs: CostModel, n_slots: int) -> None:
        self._costs = costs
        self._n_slots = n_slots
        self.n_generated = _FIRST_GUESS
        """Tokens that an answer has had of late."""
        self._pace = 1.0
        """Seconds of work, as measured at the start, that get done in a second with all slots busy."""

    def progressed(self, n_prompt: int, n_generated: int, seconds: float) -> None:
        """Learn how fast work gets done from a step with all slots busy, `seconds` without sampling:
        neighbours on the machine slow it down, and so do bounded stalls."""
        done_s = n_prompt * self._costs.prompt_token_s + n_generated * self._token_s
        if done_s > 0 and seconds > 0:
            weight = -math.expm1(-seconds / _PACE_S)
            self._pace += weight * (done_s / seconds - self._pace)

    @property
    def _token_s(self) -> float:
        return self._costs.steps_s(self._n_slots, 0) / self._n_slots

    def ended(self, sequence: Sequence) -> None:
        """Learn from an answer's length."""
        self.n_generated += _NEWEST * (sequence.n_generated - self.n_generated)

    def forecast(self, live: Iterable[Sequence]) -> Forecast:
        """The forecast over these sequences."""
        prompt_token_s, token_s = (
            seconds / self._pace for seconds in (self._costs.prompt_token_s, self._token_s)
        )
        rates = self._n_slots, prompt_token_s, token_s, self.n_generated
        parts, work = Forecast(*rates).parts_of, dict[str, float]()
        work_s = prefill_s = background_s = 0.0
        for sequence in live:
            client, (prompt_s, answer_s) = sequence.request.account, parts([sequence])
            work[client] = work.get(client, 0.0) + prompt_s + answer_s
            if sequence.request.background:
                background_s += prompt_s + answer_s
            else:
                work_s += prompt_s + answer_s
                prefill_s += prompt_s
        return Forecast(*rates, work_s, prefill_s, work, background_s)
