"""Measures ways to do the same work in turns, and compares them. Pure but for what is measured.

A machine that others use as well changes its speed from minute to minute, so only what is close together is
compared: the ways of one round. They take turns (A B C, C B A, ...), so that no drift favours one of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from serve_app.measure.benchmark import spread, table

Way = TypeVar("Way", bound=Hashable)
Measured = TypeVar("Measured")


def turns(ways: Sequence[Way], number: int) -> Sequence[Way]:
    """The ways in the order of the round of this number: even ones as they are, odd ones backwards."""
    return ways[::-1] if number % 2 else ways


def in_turns(
    ways: Sequence[Way],
    n_rounds: int,
    measure: Callable[[int, Way], Measured],
    *,
    warm_up: bool = True,
) -> list[dict[Way, Measured]]:
    """Each round's results by way, in the order of `ways`. `measure(number, way)` is called for every
    way in the rounds 1 to `n_rounds`, and before them in round 0, which is to warm up and is left out.
    Raises what it raises."""
    found = []
    for number in range(0 if warm_up else 1, n_rounds + 1):
        measured = {way: measure(number, way) for way in turns(ways, number)}
        if number:
            found.append({way: measured[way] for way in ways})
    return found


def of_each(rounds: Sequence[Mapping[Way, Measured]]) -> Iterator[tuple[Way, list[Measured]]]:
    """The ways, each with what was measured of it in all rounds."""
    for way in rounds[0]:
        yield way, [one[way] for one in rounds]


def ratios(values: Sequence[float | None], baseline: Sequence[float | None]) -> list[float] | None:
    """The values over those of the baseline in the same rounds; None if one is unknown, or the baseline's
    is 0."""
    found = []
    for value, other in zip(values, baseline, strict=True):
        if value is None or not other:
            return None
        found.append(value / other)
    return found


def ratio_spread(values: Sequence[float | None], baseline: Sequence[float | None]) -> str:
    """The ratios as a cell of a table: median (min-max); a dash if there are none."""
    return spread(ratios(values, baseline) or [])


def compared(
    rounds: Sequence[Mapping[str, float]],
    baseline: str,
    header: tuple[str, str, str],
    text: Callable[[float], str],
) -> str:
    """A Markdown table with a row for each way: its name, its median as `text` writes it, and its ratios to
    the baseline way."""
    by_way = dict(of_each(rounds))
    rows = [
        (way, text(statistics.median(values)), ratio_spread(values, by_way[baseline]))
        for way, values in by_way.items()
    ]
    return table(header, rows)
