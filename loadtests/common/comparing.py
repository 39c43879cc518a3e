"""Ways that are compared in tables, and the type of their arguments."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from serve_app.cli.measure.benchmark import of_each, ratios, spread, table


def absolute(text: str) -> Path:
    """A type of argument: a file that is opened from another folder, as servers do."""
    return Path(text).resolve()


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
