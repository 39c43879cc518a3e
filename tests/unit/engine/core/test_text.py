"""Text of one sequence: whole characters, stop strings, time and indentation."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.sampling import SamplingParams
from serve_app.engine.core.text import Detokenizer, LineLimits

EURO = "€".encode()
GRIN = "😀".encode()
BAD = "�"


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "rest", "stop"),
    [
        pytest.param((), [b"a", b"bc"], ["a", "bc"], "", None, id="plain"),
        pytest.param((), [b"", b"a"], ["", "a"], "", None, id="empty piece"),
        pytest.param(("ab",), [b"xaby"], ["x"], "", "ab", id="within one token"),
        pytest.param(("END",), [b"xE", b"N", b"Dy"], ["x", "", ""], "", "END", id="over three"),
        pytest.param(("ab",), [b"abc"], [""], "", "ab", id="at the very beginning"),
        pytest.param(("ab",), [b"a", b"c"], ["", "ac"], "", None, id="false start is shown"),
        pytest.param(
            ("aab",), [b"a", b"a", b"a", b"b"], ["", "", "a", ""], "", "aab", id="restart"
        ),
        pytest.param(("abac",), [b"aba", b"bac"], ["", "ab"], "", "abac", id="overlapping restart"),
        pytest.param(("abc",), [b"xa", b"b"], ["x", ""], "ab", None, id="held text is flushed"),
        pytest.param(("b", "c"), [b"a", b"c"], ["a", ""], "", "c", id="any of several"),
        pytest.param(("c", "b"), [b"abc"], ["a"], "", "b", id="the earliest of several"),
        pytest.param(("ab", "abc"), [b"a", b"b", b"c"], ["", ""], "", "ab", id="prefix of another"),
        pytest.param(("abc", "ab"), [b"xabc"], ["x"], "", "abc", id="one place: the first listed"),
        pytest.param(("ab", "abc"), [b"xabc"], ["x"], "", "ab", id="one place: listed otherwise"),
        pytest.param(
            ("xyz", "y"), [b"x", b"y"], ["", "x"], "", "y", id="inside another's beginning"
        ),
        pytest.param(("€",), [EURO[:2], EURO[2:]], ["", ""], "", "€", id="stop split in its bytes"),
        pytest.param((), [EURO[:1], EURO[1:]], ["", "€"], "", None, id="character over two tokens"),
        pytest.param((), [bytes([b]) for b in GRIN], ["", "", "", "😀"], "", None, id="over four"),
        pytest.param((), [b"a" + EURO[:2]], ["a"], BAD, None, id="cut character is flushed"),
        pytest.param((), [b"\xff", b"a"], [BAD, "a"], "", None, id="byte that is never UTF-8"),
        pytest.param(
            (), [EURO[:2], b"a"], ["", BAD + "a"], "", None, id="character never finished"
        ),
        pytest.param(("ab",), [b"a", EURO[:1]], ["", ""], "a" + BAD, None, id="both are held"),
    ],
)
def test_shows_only_what_is_certain(
    stops: tuple[str, ...], pieces: list[bytes], shown: list[str], rest: str, stop: str | None
) -> None:
    text = Detokenizer(stops)
    assert [text.push(piece) for piece in pieces[: len(shown)]] == shown
    assert text.stop == stop
    if stop is None:
        assert text.flush() == rest
        assert text.flush() == ""


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_text_does_not_depend_on_how_bytes_are_split(data: bytes, cuts: list[int]) -> None:
    borders = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    text = Detokenizer()
    shown = [text.push(data[start:end]) for start, end in pairwise(borders)]
    assert "".join(shown) + text.flush() == data.decode(errors="replace")


@given(
    whole=st.text("abcé€", max_size=30),
    stops=st.lists(st.text("abcé€", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_first_stop_that_is_complete_ends_the_text(whole: str, stops: list[str]) -> None:
    text = Detokenizer(stops)
    shown = ""
    for byte in whole.encode():
        shown += text.push(bytes([byte]))
        if text.stop is not None:
            break
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    assert (text.stop is not None) == bool(ends)
    if text.stop is None:
        assert shown + text.flush() == whole
    else:
        assert whole.startswith(shown + text.stop)
        assert len(shown + text.stop) == min(ends)


def test_a_token_takes_no_longer_with_many_stops_than_with_one() -> None:
    """All of them nearly match: to compare the text with each took 40 ms a token."""

    def seconds(n_stops: int) -> float:
        took = []
        for _ in range(3):
            text = Detokenizer([f"{'a' * 1000}{number}" for number in range(n_stops)])
            text.push(b"a" * 1000)
            began = time.thread_time()
            for _ in range(20):
                assert text.push(b"a") == "a"
            took.append(time.thread_time() - began)
        return min(took)

    assert seconds(256) < 4 * seconds(1)


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
