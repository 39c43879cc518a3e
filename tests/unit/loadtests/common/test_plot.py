"""Charts as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from loadtests.common.plot import COLOURS, Chart, svg, ticks


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (0, [0, 1]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (7.3, [0, 2, 4, 6, 8]),
        (100, [0, 20, 40, 60, 80, 100]),
        (101, [0, 25, 50, 75, 100, 125]),
        (4200, [0, 1000, 2000, 3000, 4000, 5000]),
        (0.003, [0, 0.001, 0.002, 0.003]),
    ],
)
def test_ticks_are_round_and_reach_the_top(top: float, expected: list[float]) -> None:
    assert ticks(top) == pytest.approx(expected)


def test_a_line_keeps_its_colour_in_every_chart_and_skips_what_is_missing() -> None:
    charts = [
        Chart("one", ["1", "2", "4"], {"a": [1.0, None, 3.0], "b": [2.0, 2.0, 2.0]}),
        Chart("two", ["1", "2", "4"], {"b": [5.0, 5.0, 5.0]}),
    ]
    root = ElementTree.fromstring(svg("A <title> & more", "sequences", charts))
    lines = [(e.get("stroke"), e.get("points")) for e in root.iter() if e.get("points")]
    assert [colour for colour, _ in lines] == [COLOURS[0], COLOURS[1], COLOURS[1]]
    assert [len((points or "").split()) for _, points in lines] == [2, 3, 3]
    assert "A <title> & more" in [e.text for e in root.iter()]


def test_larger_values_stand_higher() -> None:
    root = ElementTree.fromstring(svg("", "x", [Chart("one", ["1", "2"], {"a": [0.0, 10.0]})]))
    low, high = (float(e.attrib["cy"]) for e in root.iter() if e.tag.endswith("circle"))
    assert high < low
