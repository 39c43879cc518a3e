"""The figures of a batch and of the people beside it on one machine. Pure: no engine, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from serve_app.cli.measure.benchmark import percentile

Span = tuple[float, float]
"""When something began and ended, in seconds."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question of somebody who chats."""

    asked_s: float
    ended_s: float
    """When the answer was there, or nobody looked any more."""
    tokens_s: tuple[float, ...]
    """When each token of the answer came, in the same seconds."""


@dataclass(frozen=True, slots=True)
class Window:
    """So many seconds of an engine."""

    wall_s: float
    turns: tuple[Turn, ...] = ()
    """Of all who chat."""
    line_tokens: float = 0
    """Generated for lines of a batch."""

    @property
    def ttft_s(self) -> float:
        """The 95th percentile of the times to a first token."""
        answered = [turn for turn in self.turns if turn.tokens_s]
        return percentile([turn.tokens_s[0] - turn.asked_s for turn in answered], 95)

    @property
    def gap_s(self) -> float:
        """The 99th percentile of the gaps between two tokens."""
        return percentile([b - a for turn in self.turns for a, b in pairwise(turn.tokens_s)], 99)

    @property
    def tokens_per_s(self) -> float:
        """Generated for lines."""
        return self.line_tokens / self.wall_s

    @property
    def left(self) -> float:
        """The share of the seconds in which nobody waited for an answer, nor for more of one."""
        spans = [(turn.asked_s, turn.ended_s) for turn in self.turns]
        return 1 - covered_s(spans, self.wall_s) / self.wall_s


def covered_s(spans: Iterable[Span], until_s: float) -> float:
    """Seconds from 0 to `until_s` that lie in any of the spans."""
    total, reached = 0.0, 0.0
    for began, ended in sorted(spans):
        began, ended = max(began, reached), min(ended, until_s)
        if ended > began:
            total += ended - began
            reached = ended
    return total


def used_of_left(
    beside: Sequence[Window], users: Sequence[Window], alone: Sequence[Window]
) -> list[float]:
    """Of the cores' time that people leave without a batch, what the batch uses beside them, in each round:
    its speed over what it has alone, over the share of the time that they leave."""
    return [
        here.tokens_per_s / (whole.tokens_per_s * calm.left)
        for here, calm, whole in zip(beside, users, alone, strict=True)
    ]
