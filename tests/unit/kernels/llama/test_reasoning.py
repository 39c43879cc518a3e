"""Reasoning that is ended when its budget is used up."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.sampling import ReasoningBudget
from serve_app.kernels.llama.sampler import ReasoningLimit

PROMPT = (1, 2, 3)
OPEN, CLOSE, SAID = (60,), (61, 62), (70, 71)
HALF = 200
"""Begins a character that the next token ends."""


def piece(token: int) -> bytes:
    return {HALF: b"\xc3", HALF + 1: b"\xa4"}.get(token, b"x")


def written(
    picks: Sequence[int], n_tokens: int, *, is_open: bool = True, begun: Sequence[int] = ()
) -> list[int]:
    """The text, if these tokens were picked wherever one may be."""
    budget = ReasoningBudget(n_tokens, len(PROMPT), is_open, OPEN, CLOSE, SAID + CLOSE)
    limit, text = ReasoningLimit(budget, (*PROMPT, *begun), piece), list(begun)
    left = list(picks)
    while left or limit.next is not None:
        token = limit.next
        text.append(left.pop(0) if token is None else token)
        limit.accept(text[-1])
    return text


def test_the_budget_is_used_up() -> None:
    assert written([5] * 6, 3) == [5, 5, 5, *SAID, *CLOSE, 5, 5, 5]
    assert written([5] * 3, 0) == [*SAID, *CLOSE, 5, 5, 5]


def test_reasoning_that_ends_by_itself() -> None:
    picks = [5, *CLOSE, 6, 6, 6, 6]
    assert written(picks, 3) == picks
    assert written([5, CLOSE[0], 5, 5], 3) == [5, CLOSE[0], 5, *SAID, *CLOSE, 5]


def test_reasoning_that_begins_later_or_never() -> None:
    assert written([7, *OPEN, 5, 5, 5], 2, is_open=False) == [7, *OPEN, 5, 5, *SAID, *CLOSE, 5]
    assert written([5] * 9, 2, is_open=False) == [5] * 9


def test_no_character_is_cut() -> None:
    assert written([5, HALF, HALF + 1, 5], 2) == [5, HALF, HALF + 1, *SAID, *CLOSE, 5]


@given(st.lists(st.sampled_from([5, 60, 61, 62, HALF, HALF + 1]), max_size=12), st.integers(0, 5))
def test_who_goes_on_elsewhere_writes_the_same(picks: list[int], n_tokens: int) -> None:
    """As many tokens as were picked are picked again, wherever the other replica stopped."""
    text = written(picks, n_tokens)
    for n_begun in range(len(text) + 1):
        budget = ReasoningBudget(n_tokens, len(PROMPT), True, OPEN, CLOSE, SAID + CLOSE)
        limit = ReasoningLimit(budget, (*PROMPT, *text[:n_begun]), piece)
        for token in text[n_begun:]:
            assert limit.next in (None, token)
            limit.accept(token)
