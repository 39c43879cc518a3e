"""Seeded draws that keep what is held out for the evaluation out of the training text."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

from tools.builtin_model.corpus import tables

T = TypeVar("T")

Draw = Callable[[], str]
"""Draws one name, place or number."""

_HELD_OUT_SHARE = 4  # one pair in so many


class Source:
    """Draws for one side of the split: training, or held out.

    Any two words are a pair of one side alone, by a hash of them, so that what the evaluation asks
    was never together in training. Not thread-safe.
    """

    def __init__(self, seed: str, *, held_out: bool = False) -> None:
        self.random = random.Random(seed)
        self.held_out = held_out

    def owns(self, *values: str) -> bool:
        """Whether every pair of these values is on this side."""
        return all(
            (zlib.crc32(f"{one}\n{other}".encode()) % _HELD_OUT_SHARE == 0) is self.held_out
            for one, other in combinations(sorted(values), 2)
        )

    def together(self, *draws: Draw) -> list[str]:
        """One value of each draw, all different, every pair of them on this side."""
        while True:
            values = [draw() for draw in draws]
            if len(set(values)) == len(values) and self.owns(*values):
                return values

    def choice(self, values: Sequence[T]) -> T:
        return values[int(self.random.random() * len(values))]

    def sample(self, values: Sequence[T], count: int) -> list[T]:
        return self.random.sample(values, count)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return low + int(self.random.random() * (high - low + 1))

    def of(self, values: Sequence[str]) -> Draw:
        """A draw from these values."""
        return lambda: self.choice(values)

    def name(self) -> str:
        """A first name; often one that nobody has, so that names are copied and not known."""
        return self.choice(tables.NAMES) if self.chance(0.55) else self.made_up().capitalize()

    def city(self) -> str:
        """A city, sometimes one that does not exist."""
        return self.choice(tables.CITIES) if self.chance(0.65) else self.made_up().capitalize()

    def age(self) -> str:
        return str(self.integer(5, 99))

    def code(self) -> str:
        """A number of three or four digits."""
        return str(self.integer(100, 9999))

    def made_up(self) -> str:
        """A word of two or three syllables that means nothing."""
        syllables = [
            self.choice(_ONSETS) + self.choice("aeiou") for _ in range(2 if self.chance(0.7) else 3)
        ]
        return "".join(syllables) + self.choice(_CODAS)


_ONSETS = (*"bcdfghjklmnprstvwz", "br", "dr", "fl", "gr", "kl", "pr", "sh", "st", "tr", "th")
_CODAS = ("", "", "", "l", "n", "r", "s", "k", "m", "x")
