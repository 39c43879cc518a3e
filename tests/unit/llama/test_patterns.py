"""Clients' regular expressions, over texts in pieces: they find what Python's own find."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.llama.grammars.patterns import MOST_STEPS, Pattern, Search, compiled

SOURCES = [
    "<tool_call>",
    "a|bc|",
    "(a+)b",
    "^x*(y|z)",
    r"^(?:x|\n)*(y)\Z",
    r"[\s\S]*?(<a>[\s\S]*)",
    r"(\s*`(?:json)?\s*\n)?(<a)",
    "a{2,3}(b??)c",
    "(a|b)*c",
    "[^ab]c",
    "x(y*)(z+)",
    r"\d+\.|\w\W",
    r"[a-c\d.]+x|[^\s<]<",
    "((a)b|c)+d",
]
MANY_CHARS = "".join(map(chr, range(0x4E00, 0x4E00 + 1000)))
TEXTS = st.text("abcxyz<>f 1.\n`", max_size=12)


def expected(source: str, text: str) -> int | None:
    found = re.search(source, text, re.A)
    if found is None:
        return None
    groups = (found.start(i) for i in range(1, found.re.groups + 1) if found[i])
    return next(groups, found.start())


@pytest.mark.parametrize("source", SOURCES)
@given(text=TEXTS)
def test_they_find_what_pythons_own_find(source: str, text: str) -> None:
    assert Search(Pattern(source)).feed(text) == expected(source, text)


@pytest.mark.parametrize("source", SOURCES)
@given(pieces=st.lists(TEXTS, max_size=4))
def test_a_match_is_found_with_the_first_piece_that_has_it(source: str, pieces: list[str]) -> None:
    search, text = Search(Pattern(source)), ""
    for piece in pieces:
        text += piece
        found, wanted = search.feed(piece), expected(source, text)
        assert (found is None) is (wanted is None)
        if found is not None:
            return


def test_time_is_linear_whatever_the_expression_is() -> None:
    search = Search(Pattern("(a+)+(a|aa)*$b"))
    assert search.feed("a" * 2000) is None
    assert len(search._threads) <= len(search._steps)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("(", "unterminated"),
        ("(a{50}){50}", "too long"),
        ("(?:){13000000}x", "too long"),
        ("(?:(?:){400}){400}", "too long"),
        ("(?:)" * 2000, "too long"),
        ("(?:" * 330 + "a" + "|bc)" * 330, "recursion"),
        (f"[{MANY_CHARS}]", "too long"),
        (r"(a)\1", "groupref is not supported"),
        ("(?=a)", "assert is not supported"),
        ("a{99999999999999999999}", "too large"),
    ],
)
def test_what_is_refused(source: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Pattern(source)


def test_all_members_of_a_class_count() -> None:
    assert Search(Pattern(f"[{MANY_CHARS[: MOST_STEPS - 2]}]")).feed(MANY_CHARS[5]) == 0


def test_patterns_are_bounded_together_and_count_once() -> None:
    half = "a" * (MOST_STEPS // 2 - 1)
    first, second = compiled((half, half.upper(), half))
    assert (len(first.steps), len(second.steps)) == (MOST_STEPS // 2, MOST_STEPS // 2)
    with pytest.raises(ValueError, match="too long"):
        compiled((half, half.upper(), "b"))


def test_so_long_is_not_too_long() -> None:
    assert Search(Pattern("a" * (MOST_STEPS - 1))).feed("a" * (MOST_STEPS - 1)) == 0
