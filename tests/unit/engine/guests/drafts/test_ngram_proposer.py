"""Drafts from a sequence's own tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.guests.drafts.ngram_proposer import NgramProposer


@pytest.mark.parametrize(
    ("tokens", "n_most", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, (4, 5)),
        ([1, 2, 3, 4, 5, 1, 2, 3], 9, (4, 5, 1, 2, 3, 4, 5, 1, 2)),  # and so on
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1, (5,)),  # the last time counts
        ([1, 2, 3, 4, 5, 6], 4, ()),
        ([7, 7, 7, 7], 3, (7, 7, 7)),
        ([1, 2], 3, ()),
        ([1, 2, 3, 4, 1, 2, 3], 0, ()),
    ],
)
def test_drafts_are_what_followed_the_last_time(
    tokens: list[int], n_most: int, expected: tuple[int, ...]
) -> None:
    assert NgramProposer().draft(tokens, n_most) == expected


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_growing_text_gives_the_same_drafts_as_new_text(tokens: list[int], n_most: int) -> None:
    proposer = NgramProposer()
    for end in range(len(tokens) + 1):
        assert proposer.draft(tokens[:end], n_most) == NgramProposer().draft(tokens[:end], n_most)


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2)), st.integers(1, 9))
def test_a_long_text_is_indexed_bit_by_bit_and_then_known_whole(
    prompt: list[int], answer: list[int], max_indexed: int
) -> None:
    proposer = NgramProposer()
    for n_calls in range(len(prompt) + 1):
        n_known = len(proposer._after)
        proposer.draft(prompt, 5, max_indexed)
        assert len(proposer._after) <= n_known + max_indexed
        last = prompt[max(0, len(prompt) - (n_calls + 1) * max_indexed - 3) :]
        assert proposer.draft(prompt, 5, 0) == NgramProposer().draft(last, 5)
    for end in range(len(answer) + 1):
        text = prompt + answer[:end]
        assert proposer.draft(text, 5, max_indexed) == NgramProposer().draft(text, 5)


def test_changed_text_is_indexed_anew() -> None:
    proposer = NgramProposer()
    assert proposer.draft([1, 2, 3, 4, 1, 2, 3], 1) == (4,)
    proposer.forget()
    assert proposer.draft([3, 4, 1, 2, 3], 1) == ()


@pytest.mark.parametrize(("next_token", "rate"), [(4, 0.55), (9, 0.45)])
def test_a_draft_that_nobody_verified_is_learned_from_when_its_token_comes(
    next_token: int, rate: float
) -> None:
    proposer, text = NgramProposer(), [1, 2, 3, 4, 1, 2, 3]
    proposer.draft(text, 1)
    proposer.draft(text, 1)
    assert proposer.rate.acceptance == 0.5
    proposer.draft([*text, next_token], 1)
    assert proposer.rate.acceptance == pytest.approx(rate)


def test_a_draft_that_was_verified_is_not_learned_from_again() -> None:
    proposer, text = NgramProposer(), [1, 2, 3, 4, 5, 1, 2, 3]
    proposer.draft(text, 2)
    proposer.record(2, 2)
    known = proposer.rate.acceptance
    proposer.draft([*text, 4, 5, 6], 1)
    assert proposer.rate.acceptance == known > 0.5
