"""Whose hidden states are known, and which are fed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serve_app.kernels.llama.hidden_states import HiddenStates, States

N_KEPT, N_EMBD = 8, 2


def rows(seq_id: int, places: range) -> list[tuple[int, int, int, bool]]:
    return [(0, place, seq_id, False) for place in places]


def states(places: range, mark: int = 0) -> States:
    """What tells place and mark."""
    return np.array([[place, mark] for place in places], np.float32).reshape(-1, N_EMBD)


def computed(known: HiddenStates, seq_id: int, places: range, mark: int = 0) -> None:
    known.add(rows(seq_id, places), states(places, mark))


def test_a_text_from_its_beginning_is_fed_whole() -> None:
    known = HiddenStates(1, N_KEPT, N_EMBD)
    computed(known, 0, range(5))
    assert known.first_fed(0) == 0
    assert known.before(0, 0).tolist() == [0, 0]
    assert [known.before(0, place)[0] for place in range(1, 6)] == [0, 1, 2, 3, 4]


def test_only_the_last_ones_are_kept() -> None:
    known = HiddenStates(1, N_KEPT, N_EMBD)
    computed(known, 0, range(5))
    computed(known, 0, range(5, 30))
    assert known.first_fed(0) == 30 - N_KEPT + 1
    assert known.before(0, 30)[0] == 29
    assert known.before(0, known.first_fed(0))[0] == 30 - N_KEPT


def test_rows_of_several_sequences_and_of_none_that_is_kept() -> None:
    known = HiddenStates(2, N_KEPT, N_EMBD)
    known.add(
        [*rows(0, range(3)), *rows(1, range(2)), *rows(2, range(4))],
        np.concatenate([states(range(3), 0), states(range(2), 1), states(range(4), 2)]),
    )
    assert known.before(0, 3).tolist() == [2, 0]
    assert known.before(1, 2).tolist() == [1, 1]


def test_what_was_restored_is_not_known() -> None:
    known = HiddenStates(1, N_KEPT, N_EMBD)
    computed(known, 0, range(5))
    known.forget(0)
    assert known.first_fed(0) > 1000
    computed(known, 0, range(20, 22))
    assert known.first_fed(0) == 21


def test_drafts_that_were_wrong_are_computed_again() -> None:
    known = HiddenStates(1, N_KEPT, N_EMBD)
    computed(known, 0, range(6))
    known.cut(0, 4)
    computed(known, 0, range(4, 5), mark=7)
    assert known.first_fed(0) == 0
    assert known.before(0, 5).tolist() == [4, 7]
    known.cut(0, 0)
    assert known.first_fed(0) > 1000


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("computed"), st.integers(1, 12)),
            st.tuples(st.just("cut"), st.integers(0, 12)),
            st.tuples(st.just("moved"), st.integers(0, 12)),
        ),
        max_size=20,
    )
)
def test_what_is_fed_is_always_the_text_s_own(changes: list[tuple[str, int]]) -> None:
    known, marks = HiddenStates(1, N_KEPT, N_EMBD), list[int | None]()
    for mark, (kind, n) in enumerate(changes):
        if kind == "computed":
            places = range(len(marks), len(marks) + n)
            marks += [mark] * n
            computed(known, 0, places, mark)
        elif kind == "cut":
            del marks[max(0, len(marks) - n) :]
            known.cut(0, len(marks))
        else:  # other tokens, of which nothing is known
            marks = [None] * n
            known.forget(0)
        for place in range(max(1, known.first_fed(0)), len(marks) + 1):
            assert known.before(0, place).tolist() == [place - 1, marks[place - 1]]
