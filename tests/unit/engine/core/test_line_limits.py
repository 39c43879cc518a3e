"""Texts that end at a line break."""

from __future__ import annotations

import pytest

from serve_app.engine.core.text import LineLimits
from serve_app.sampling import SamplingParams


def said(limits: LineLimits, *pieces: str, elapsed_s: float = 0.0) -> str | None:
    """The text, if it ends with one of these pieces; None if it goes on."""
    text = ""
    for piece in pieces:
        cut = limits.cut(piece, elapsed_s)
        if cut is not None:
            return text + cut
        text += piece
    return None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("if x:\n    a\n    b", None),
        ("if x:\n    a\nb", "if x:\n    a\n"),
        ("if x:\n    a\n b", "if x:\n    a\n "),
        ("  x\n\t a\n\t\tb", None),
        ("no line", None),
        ("a\n  b\n\nc", "a\n  b\n"),
        ("a\n ", None),
    ],
)
def test_lines_that_are_indented_too_little(text: str, shown: str | None) -> None:
    params = SamplingParams(n_indent=2)
    assert said(LineLimits(params), text) == shown
    assert said(LineLimits(params), *text) == shown


@pytest.mark.parametrize(
    ("elapsed_s", "shown"), [(0.0, None), (0.5, None), (0.6, "a\n"), (9.0, "a\n")]
)
def test_the_time_is_over_at_a_line_break(elapsed_s: float, shown: str | None) -> None:
    params = SamplingParams(t_max_predict_ms=500)
    assert said(LineLimits(params), "a", "\n", "b", elapsed_s=elapsed_s) == shown
    assert said(LineLimits(params), "a", "b", elapsed_s=elapsed_s) is None


@pytest.mark.parametrize("max_ms", [0, -1])
def test_no_limit(max_ms: int) -> None:
    assert said(LineLimits(SamplingParams(t_max_predict_ms=max_ms)), "a\nb\n", elapsed_s=9) is None
