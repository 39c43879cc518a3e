"""Learns from the traffic which kind of cache pays. Pure: no model, no threads, no clock.

Every step is forecast for both kinds: for the present kind by what was learned, for the other one by its
profile. That has what was learned when the engine had that kind. The yardstick is what costs the same with
both, a short prompt of one sequence with nothing before it. So the engine's experience with its present
kind favours neither, nor does a machine that was busier while one of them was measured. The time that the
other kind would have saved is the regret. The cache is to change when that exceeds what the change costs.
So no traffic, however it changes, makes the engine lose much more than if it had known it. Source: Borodin,
Linial, Saks, "An optimal on-line algorithm for metrical task system", 1992.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.engine.choice.plan import Mode
from serve_app.engine.costs.cost_model import CostModel, Profile

# The other kind must be so much faster, or it is noise.
_LEAST_GAIN = 0.1
# Seconds of work after which what was seen hardly counts any more.
_REMEMBERED_S = 60.0
# What other programs had of the time of the measurement speaks against a change, by this factor.
_DISTRUST = 1.0
# Rows of a prompt that hardly look at each other: they cost the same with both kinds.
_YARDSTICK_ROWS = 64


class Load(NamedTuple):
    """The rows and cells that a step computes."""

    n_decoding: float = 0.0
    """Sequences that get their next token."""
    decode_depth: float = 0.0
    """The tokens that each has in the cache, on average."""
    prompts: tuple[tuple[int, float], ...] = ()
    """The rows of each prompt, and its tokens in the cache."""
    n_cells: float = 0.0
    """Tokens in all slots, if what they have in common counts once."""


@dataclass(slots=True)
class _Kind:
    """A kind of cache, and what batches cost in it."""

    mode: Mode
    costs: CostModel
    seconds: float = 0.0
    """The time that the recent traffic takes with it."""

    def decode_s(self, n_rows: int, depth: float) -> float:
        """Seconds of a step that only decodes, of sequences that share nothing."""
        if not self.mode.kv_unified:
            return self.costs.steps_s(n_rows, depth)
        return self.costs.decode_s(n_rows, self.costs.effective_past(depth, n_rows * depth))

    def forecast_s(self, load: Load, most_s: float) -> float:
        """Seconds of a step; in a unified cache, prompts and decoding sequences share a batch. In a split
        one, decoding takes `most_s` at most."""
        n_decoding, n_prompt = round(load.n_decoding), sum(n for n, _ in load.prompts)
        if not self.mode.kv_unified:
            decode_s = self.decode_s(n_decoding, load.decode_depth) if n_decoding else 0.0
            return min(decode_s, most_s) + self._prompts_s(load.prompts, n_prompt)
        n_rows = n_decoding + n_prompt
        tokens = n_decoding * load.decode_depth + sum(n * depth for n, depth in load.prompts)
        depth = self.costs.effective_past(tokens / max(1, n_rows), load.n_cells)
        one = self.costs.prefill_s if n_prompt else self.costs.decode_s
        return one(n_rows, depth) if n_rows else 0.0

    def _prompts_s(self, prompts: Iterable[tuple[int, float]], n_prompt: int) -> float:
        """Seconds of the prompts in a split cache: rows are computed together, but attention by prompt."""
        at = self.costs.prefill_s
        attention_s = sum(at(n, depth) - at(n, 0) for n, depth in prompts)
        return at(n_prompt, 0) + attention_s if n_prompt else 0.0


class Traffic:
    """Compares the kind of cache that the engine has with the other one. Decoder thread only."""

    def __init__(
        self, own: tuple[Mode, CostModel], other: tuple[Mode, Profile], share: float = 1.0
    ) -> None:
        """The engine learns the costs of its `own` kind. The profiles had that `share` of the time."""
        self._own = _Kind(*own)
        self._other = _Kind(other[0], CostModel(other[1]))
        self._yardsticks = self._other.costs.yardsticks(_YARDSTICK_ROWS)
        """Seconds of short prompts with the other kind, of which nothing is learned."""
        self._least_gain = max(_LEAST_GAIN, _DISTRUST * (1 - share))
        self._load = Load()
        """The load that the last steps had alike."""
        self._n_alike = 0
        self._step_s = 0.0, 0.0
        """Seconds of such a step, with one kind of cache and with the other."""

    def regret_s(self) -> float:
        """Seconds that the other kind would have saved lately, less what may be noise; 0 or more."""
        self._add_up()
        return self._own.seconds - (1 + self._least_gain) * self._other.seconds

    def observe(self, load: Load) -> None:
        """A step computed that. Takes hardly any time if the step before did, too."""
        if load != self._load:
            self._add_up()
            self._load = load
            self._step_s = self._forecasts(load, self._speed())
        self._n_alike += 1

    def _forecasts(self, load: Load, speed: float) -> tuple[float, float]:
        """Seconds of a step with the own kind, and with the other one.

        A split cache takes no longer than a unified one whose sequences share nothing. They attend to the
        same cells there, and to those of others besides. So a slope that was measured wrongly, for one row
        and counted for all, does not speak against a split cache for long.
        """
        own, other, n = self._own, self._other, round(load.n_decoding)
        most_s = math.inf, math.inf
        if n and own.mode.flash_attn == other.mode.flash_attn:
            most_s = (
                speed * other.decode_s(n, load.decode_depth),
                own.decode_s(n, load.decode_depth) / speed,
            )
        return own.forecast_s(load, most_s[0]), speed * other.forecast_s(load, most_s[1])

    def _speed(self) -> float:
        """How much longer a short prompt takes by what was learned than by the other kind's profile."""
        own, other = self._own.costs.yardsticks(_YARDSTICK_ROWS), self._yardsticks
        ratios = [own[n] / other[n] for n in own.keys() & other.keys()]
        return statistics.median(ratios) if ratios else 1.0

    def _add_up(self) -> None:
        """The last steps, as if one after the other: each makes those before it count a bit less."""
        own, other, n = self._own, self._other, self._n_alike
        own_s, other_s = self._step_s
        kept = max(0.0, 1 - own_s / _REMEMBERED_S)
        weight = (1 - kept**n) / (1 - kept) if kept < 1 else n
        own.seconds = kept**n * own.seconds + weight * own_s
        other.seconds = kept**n * other.seconds + weight * other_s
        if own.seconds < (1 + self._least_gain) * other.seconds:
            own.seconds = other.seconds = 0.0
        self._n_alike = 0

    def reason(self, need: str = "") -> str:
        """Why the engine has the other kind from now on, in a line: for that `need`, or by the traffic."""
        self._add_up()
        own, other = self._own, self._other
        work = f"{own.seconds:.1f} s of work with {own.mode}, and {other.seconds:.1f} s so"
        return f"{other.mode}: {need or f'by the traffic of late, {work}'}"
