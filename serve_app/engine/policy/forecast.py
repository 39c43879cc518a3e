"""Forecasts: the seconds of work that are queued, and the waits that follow. Pure: no threads, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from serve_app.base.values.answers import Accepted, FinishReason, SequenceEnd
from serve_app.channel.score import crowding_by_load, first_token_s, slot_wait_s
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.costs.cost_model import CostModel
from serve_app.engine.metrics.stats import ForecastStats

# Seconds of full slots after which the speed of before hardly counts any more.
_PACE_S = 10.0
# Generated tokens that a request is taken to have before any has ended, and the weight of the newest.
_FIRST_GUESS = 128.0
_NEWEST = 0.1


# Forecasts are wrong by less than so many mean deviations nineteen times of twenty.
_DEVIATIONS = 2.0
_MOST_WRONG = math.log(4)
_CLOSE = 0.25


class Correction(NamedTuple):
    """The errors of forecasts of late: by what factor times differ from what the cost model says."""

    bias: float = 1.0
    margin: float = 1.0
    """The additional factor that a time hardly ever exceeds."""


_EXACT = Correction()


class Expected(NamedTuple):
    """The forecast for a new sequence, in seconds from its submission, before it is corrected."""

    wait_s: float
    """The time to a slot."""
    alone_s: float
    """The time to the first token if there were no others."""
    first_token_s: float
    end_alone_s: float
    end_s: float


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
    prefill_by_client: Mapping[str, float] = field(default_factory=dict)
    """The part of `work_by_client` that is missing of prompts."""
    background_s: float = 0.0
    alone_token_s: float = 0.0
    """Seconds of a generated token without others."""
    first_token: Correction = _EXACT
    end: Correction = _EXACT
    """The correction of forecasts of ends."""
    first_end_s: float = 0.0
    """Seconds until the first of those that have a slot ends; 0 if there are none."""
    crowding: float = 1.0
    """The factor by which the streams of that moment slow prompts down."""

    def expect(
        self, sequence: Sequence, live: Mapping[str, int], arrived: Iterable[Sequence]
    ) -> Expected:
        """The forecast for a sequence of a client: see `wait_s`. Prompts take turns as requests do. A
        sequence in the background waits for all that `live` and `arrived` have."""
        account, n_live = sequence.request.account, sum(live.values())
        prompt_s, _ = self.parts_of([sequence])
        if sequence.is_behind:
            arrived_s = self.parts_of(arrived)
            others_s = self.work_s + self.background_s + sum(arrived_s)
            wait_s = slot_wait_s(others_s, n_live, self.n_slots)
            prefill_s = self.prefill_s + arrived_s[0]
        else:
            wait_s = self.wait_s(account, live, arrived)
            n_ahead = _count_ahead(account, live)
            prefill_s = self._part_s(n_ahead, live, arrived, of_prompts=True)
        slowed = max(self.crowding, crowding_by_load(n_live / self.n_slots))
        before_s = first_token_s(wait_s, prefill_s, prompt_s, slowed)
        n_left, alone_s = self._n_left(sequence), self.alone_token_s
        busy_s = self.n_slots * self.token_s - alone_s
        token_s = alone_s + busy_s * min(1.0, n_live / max(1, self.n_slots - 1))
        return Expected(
            wait_s=wait_s,
            alone_s=prompt_s + alone_s,
            first_token_s=before_s + token_s,
            end_alone_s=prompt_s + n_left * alone_s,
            end_s=before_s + n_left * token_s,
        )

    def acceptance(self, sequence: Sequence) -> Accepted:
        """The acceptance of a sequence, with its forecast as far as there is one."""
        expected = sequence.expected
        if expected is None or not self.token_s:
            return Accepted(background=sequence.is_behind)
        return Accepted(
            self.first_token.bias * expected.first_token_s,
            self.end.bias * expected.end_s,
            sequence.is_behind,
        )

    def _n_left(self, sequence: Sequence) -> float:
        likely = max(1.0, self.n_generated - sequence.n_generated)
        return likely if sequence.n_left is None else min(likely, sequence.n_left)

    def parts_of(self, sequences: Iterable[Sequence]) -> tuple[float, float]:
        """Seconds for what is missing of these sequences' prompts, and for their answers."""
        n_prompt, answers_s = 0, 0.0
        for sequence in sequences:
            n_cached = 0 if sequence.trace.admitted else sequence.n_likely_cached
            n_prompt += max(0, sequence.n_pending - n_cached - 1)
            answers_s += self._n_left(sequence) * self.token_s
        return n_prompt * self.prompt_token_s, answers_s

    def wait_s(self, client: str, live: Mapping[str, int], arrived: Iterable[Sequence]) -> float:
        """Seconds that the client's next request waits for a slot, as clients take turns. It is behind all
        its own, and of each other client's behind as many and one. `live` are requests by client; of them,
        `arrived` are not in `work_s` yet."""
        n_ahead = _count_ahead(client, live)
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
        self,
        counts: Mapping[str, int],
        live: Mapping[str, int],
        arrived: Iterable[Sequence],
        *,
        of_prompts: bool = False,
    ) -> float:
        """The work of so many requests of each client, of those that are live, or of their prompts."""
        work = dict(self.prefill_by_client if of_prompts else self.work_by_client)
        for sequence in arrived:
            client, (prompt_s, answer_s) = sequence.request.account, self.parts_of([sequence])
            work[client] = work.get(client, 0.0) + prompt_s + (0.0 if of_prompts else answer_s)
        return sum(work.get(client, 0.0) * n / live[client] for client, n in counts.items())


def _count_ahead(client: str, live: Mapping[str, int]) -> dict[str, int]:
    """The requests of each client that go before the next one of this client."""
    n_turns = live.get(client, 0) + 1
    return {other: min(n, n_turns) for other, n in live.items()}


class ForecastErrors:
    """Learns by what factor measured times differ from forecasts of one kind: as the mean of its logarithm,
    and the mean deviation from that. Source: V. Jacobson, "Congestion Avoidance and Control", 1988, which
    bounds times of round trips so. Decoder thread only."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0
        self.n = self.n_close = 0
        self._ratios = 0.0

    @property
    def correction(self) -> Correction:
        return Correction(math.exp(self._mean), math.exp(_DEVIATIONS * self._deviation))

    @property
    def ratio(self) -> float:
        """The mean of measured to corrected times."""
        return self._ratios / self.n if self.n else 0.0

    @property
    def close(self) -> float:
        """The part of the times that were within 25% of their forecasts."""
        return self.n_close / self.n if self.n else 0.0

    def learn(self, forecast_s: float, seconds: float) -> None:
        """Learn from a time whose forecast, without any correction, was so long. The first ones count
        alike, and long ones more: a short forecast leaves out what is always there."""
        if forecast_s <= 0 or seconds <= 0:
            return
        error = math.log(seconds / forecast_s) - self._mean
        ratio = math.exp(error)
        self.n += 1
        self.n_close += abs(ratio - 1) <= _CLOSE
        self._ratios += ratio
        weight = max(_NEWEST, 1 / (1 + self.n)) * min(1.0, forecast_s)
        self._mean = min(_MOST_WRONG, max(-_MOST_WRONG, self._mean + weight * error))
        self._deviation += weight * (min(_MOST_WRONG, abs(error)) - self._deviation)


class Backlog:
    """Forecasts by the cost model, and by how long answers have been. Decoder thread only."""

    def __init__(self, costs: CostModel, n_slots: int) -> None:
        self._costs = costs
        self._n_slots = n_slots
        self.n_generated = _FIRST_GUESS
        """Tokens that an answer has had of late."""
        self._pace = 1.0
        """Seconds of work, as measured at the start, that get done in a second with all slots busy."""
        self._first_tokens, self._ends = ForecastErrors(), ForecastErrors()

    def learn_pace(self, n_prompt: int, n_generated: int, seconds: float) -> None:
        """Learn how fast work gets done from a step of so many `seconds` with all slots busy. Sampling and
        neighbours on the machine slow it down, and so do bounded stalls."""
        done_s = n_prompt * self._costs.prompt_token_s + n_generated * self._token_s
        if done_s > 0 and seconds > 0:
            weight = -math.expm1(-seconds / _PACE_S)
            self._pace += weight * (done_s / seconds - self._pace)

    @property
    def _token_s(self) -> float:
        return self._costs.steps_s(self._n_slots, 0) / self._n_slots

    def cost_s(self, sequence: Sequence) -> float:
        """The seconds that a sequence will probably take; its tokens if nothing was measured."""
        if not self._costs:
            return sequence.n_pending + self._forecast._n_left(sequence)
        return sum(self._forecast.parts_of([sequence]))

    def learn_end(self, sequence: Sequence, end: SequenceEnd) -> None:
        """Learn from an answer's length, and from its times how wrong their forecast was. The times of one
        in the background teach nothing: whoever comes later goes first."""
        self.n_generated += _NEWEST * (sequence.n_generated - self.n_generated)
        expected, times = sequence.expected, end.timings
        if expected is None or sequence.is_behind or times.n_failovers or not sequence.n_generated:
            return
        self._first_tokens.learn(expected.first_token_s, times.first_token_s)
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._ends.learn(expected.end_s, times.first_token_s + times.decode_s)

    @property
    def stats(self) -> ForecastStats:
        first, end = self._first_tokens, self._ends
        return ForecastStats(
            first_tokens=first.n,
            first_token_ratio=round(first.ratio, 3),
            first_tokens_close=round(first.close, 3),
            ends=end.n,
            end_ratio=round(end.ratio, 3),
            ends_close=round(end.close, 3),
        )

    def forecast(self, live: Iterable[Sequence], crowding: float = 1.0) -> Forecast:
        """The forecast over these sequences, of which streams slow prompts down by that factor."""
        idle, live = self._forecast, list(live)
        work, prefill = dict[str, float](), dict[str, float]()
        n_left = (idle._n_left(sequence) for sequence in live if sequence.trace.admitted)
        first_end_s = min(n_left, default=0.0) * self._n_slots * idle.token_s
        work_s = prefill_s = background_s = 0.0
        for sequence in live:
            client, (prompt_s, answer_s) = sequence.request.account, idle.parts_of([sequence])
            work[client] = work.get(client, 0.0) + prompt_s + answer_s
            prefill[client] = prefill.get(client, 0.0) + prompt_s
            if sequence.request.background:
                background_s += prompt_s + answer_s
            else:
                work_s += prompt_s + answer_s
                prefill_s += prompt_s
        return replace(
            idle,
            work_s=work_s,
            prefill_s=prefill_s,
            work_by_client=work,
            prefill_by_client=prefill,
            background_s=background_s,
            first_token=self._first_tokens.correction,
            end=self._ends.correction,
            first_end_s=first_end_s,
            crowding=crowding,
        )

    @property
    def _forecast(self) -> Forecast:
        """The forecast over no sequences, without corrections."""
        seconds = self._costs.prompt_token_s, self._token_s, self._costs.steps_s(1, 0)
        prompt_token_s, token_s, alone_token_s = (each / self._pace for each in seconds)
        rates = prompt_token_s, token_s, self.n_generated
        return Forecast(self._n_slots, *rates, alone_token_s=alone_token_s)
