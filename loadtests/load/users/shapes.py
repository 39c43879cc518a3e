"""How a load changes over a run: number of users, or the rate at which requests arrive. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from math import pi, sin

STEPS = 5
SPIKES = 3


def constant(_: float) -> float:
    """All the time the same."""
    return 1.0


def steps(moment: float) -> float:
    """Five stairs up."""
    return min(STEPS, int(moment * STEPS) + 1) / STEPS


def spikes(moment: float) -> float:
    """A fifth; three times, for a tenth of the run, all."""
    return 1.0 if 0.4 <= moment * SPIKES % 1 < 0.4 + 0.1 * SPIKES else 0.2


def burst(moment: float) -> float:
    """Nearly nobody; all, from a tenth to a half of the run."""
    return 1.0 if 0.1 <= moment < 0.5 else 0.05


def sine(moment: float) -> float:
    """Two waves between a tenth and all, from the middle up."""
    return 0.55 + 0.45 * sin(2 * pi * 2 * moment)


SHAPES: Mapping[str, Callable[[float], float]] = {
    shape.__name__: shape for shape in (constant, steps, spikes, burst, sine)
}
"""By name: the share of the most, 0 to 1, at a moment of the run, from 0, its start, to 1, its end."""


def users_at(shape: str, at_s: float, users: int, run_s: float) -> int:
    """How many users there should be, one at least."""
    return max(1, round(users * SHAPES[shape](min(at_s / run_s, 1.0))))


def arrivals(rng: random.Random, shape: str, per_s: float, run_s: float) -> Iterator[float]:
    """When requests arrive, in seconds from the start, in order: a Poisson process whose rate follows the
    shape, `per_s` at its most. It ends with the run."""
    at_s = rng.expovariate(per_s)
    while at_s < run_s:
        if rng.random() < SHAPES[shape](at_s / run_s):  # thinning keeps it Poisson
            yield at_s
        at_s += rng.expovariate(per_s)
