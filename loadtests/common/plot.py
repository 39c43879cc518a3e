"""Line charts as SVG, without a plotting library: six small charts need none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's: told apart by the colour-blind, too."""

_COLUMNS, _WIDTH, _HEIGHT = 3, 300, 220
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 34, 12, 40
_HEAD = 56


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the same places, which stand at equal distances."""

    title: str
    places: Sequence[str]
    lines: Mapping[str, Sequence[float | None]]
    """By name, a value for each place; None is left out. Values are 0 or more."""


def svg(title: str, x_title: str, charts: Sequence[Chart]) -> str:
    """The charts, three in a row, with one legend for all: a line has its colour by its name."""
    colours = colours_of(charts)
    width = _WIDTH * min(_COLUMNS, len(charts))
    height = _HEAD + _HEIGHT * -(-len(charts) // _COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 20, title, "start"),
    ]
    x = 12
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="34" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(x + 19, 40, name, "start"))
        x += 38 + 7 * len(name)
    for i, chart in enumerate(charts):
        left, top = _WIDTH * (i % _COLUMNS), _HEAD + _HEIGHT * (i // _COLUMNS)
        parts.append(f'<g transform="translate({left} {top})">')
        parts += _chart(chart, x_title, colours)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def colours_of(charts: Sequence[Chart]) -> dict[str, str]:
    """The colour of each line, by its name."""
    names = dict.fromkeys(name for chart in charts for name in chart.lines)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def chart_svg(chart: Chart, x_title: str, colours: Mapping[str, str]) -> str:
    """One chart for a page that has the legend and the background."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" font-family="sans-serif" font-size="11" role="img" '
        f'aria-label="{escape(chart.title)}, by {escape(x_title)}">'
    ]
    return "\n".join([*parts, *_chart(chart, x_title, colours), "</svg>"])


def ticks(top: float) -> list[float]:
    """Round values from 0 to at least `top`, five steps at most."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(top / 5))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power * 5 >= top * (1 - 1e-9))
    values = [0.0]
    while values[-1] < top * (1 - 1e-9):
        values.append(len(values) * step)
    return values


def _chart(chart: Chart, x_title: str, colours: Mapping[str, str]) -> Iterator[str]:
    values = [v for line in chart.lines.values() for v in line if v is not None]
    lines_at = ticks(max(values, default=0.0))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(place: int) -> float:
        return _LEFT + (right - _LEFT) * (place + 0.5) / len(chart.places)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * value / lines_at[-1]

    yield _text(_LEFT, _TOP - 12, chart.title, "start", 'font-weight="bold"')
    for tick in lines_at:
        yield f'<path d="M{_LEFT} {y(tick):.1f}H{right}" stroke="#ddd"/>'
        yield _text(_LEFT - 6, y(tick) + 4, f"{tick:g}", "end")
    for i, place in enumerate(chart.places):
        yield _text(x(i), bottom + 15, place, "middle")
    yield _text((_LEFT + right) / 2, bottom + 31, x_title, "middle")
    for name, line in chart.lines.items():
        points = [(x(i), y(v)) for i, v in enumerate(line) if v is not None]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>'
        for a, b in points:
            yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colours[name]}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
