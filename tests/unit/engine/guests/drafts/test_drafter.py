"""What a draft model's cache has of a text: always its first tokens and its last ones."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.core.sequence import Sequence
from serve_app.engine.guests.drafts.drafter import N_SINK, Drafter, SlotWindow
from serve_app.engine.health import Progress
from tests.doubles.draft import FakeDraft
from tests.unit.engine.harness import request

N_CTX = 64
ROOM = 7


def sequence(name: str, tokens: list[int]) -> Sequence:
    made = Sequence(request(name), lambda delta: None)
    made.tokens = made.tokens[:0]
    made.tokens.extend(tokens)
    return made


def feed(window: SlotWindow) -> None:
    """All that is to be fed."""
    window.cut()
    fed = window.tail(N_CTX)
    assert [position for _, position, _ in fed] == list(
        range(len(window.cells), len(window.cells) + len(fed))
    )
    window.fed([token for token, *_ in fed])


def test_a_short_text_is_fed_whole_and_then_what_is_new() -> None:
    window, one = SlotWindow(N_CTX), sequence("a", list(range(20)))
    assert window.follow(one, ROOM) == 20
    feed(window)
    assert window.cells == list(range(20))
    one.tokens.extend([100, 101])
    assert window.follow(one, ROOM) == 2


def test_right_guesses_need_not_be_fed_and_wrong_ones_are_dropped() -> None:
    window, one = SlotWindow(N_CTX), sequence("a", list(range(10)))
    window.follow(one, ROOM)
    feed(window)
    for guess in (50, 51, 52):
        window.fed([guess], guessed=True)
    one.tokens.extend([50, 51, 99])
    assert window.follow(one, ROOM) == 1
    feed(window)
    assert window.cells == [*range(10), 50, 51, 99]


def test_another_text_that_begins_alike_is_fed_from_where_it_differs() -> None:
    window = SlotWindow(N_CTX)
    window.follow(sequence("a", list(range(20))), ROOM)
    feed(window)
    other = sequence("b", [*range(12), 70, 71])
    assert window.follow(other, ROOM) == 2
    assert window.owned_by(other)


def test_the_same_text_again_is_fed_its_last_token_for_the_logits() -> None:
    window = SlotWindow(N_CTX)
    window.follow(sequence("a", list(range(20))), ROOM)
    feed(window)
    assert window.follow(sequence("b", list(range(20))), ROOM) == 1


def test_of_a_long_text_the_first_tokens_and_the_last_ones() -> None:
    window, one = SlotWindow(N_CTX), sequence("a", list(range(500)))
    assert window.follow(one, ROOM) == N_SINK + N_CTX // 2
    feed(window)
    assert window.cells == [*range(N_SINK), *range(500 - N_CTX // 2, 500)]


def test_places_are_those_in_the_text() -> None:
    window, one = SlotWindow(N_CTX), sequence("a", list(range(500)))
    window.follow(one, ROOM)
    fed = window.tail(N_CTX)
    assert [place for *_, place in fed] == [token for token, *_ in fed] == window_of(500)


def window_of(n_text: int) -> list[int]:
    return [*range(N_SINK), *range(n_text - N_CTX // 2, n_text)]


def test_own_layers_keep_no_guess() -> None:
    window, one = SlotWindow(N_CTX, reads_states=True), sequence("a", list(range(10)))
    window.follow(one, ROOM)
    feed(window)
    for guess in (50, 51):
        window.fed([guess], guessed=True)
    one.tokens.extend([50, 51, 99])
    assert window.follow(one, ROOM) == 3
    assert window.tail(N_CTX) == [(50, 10, 10), (51, 11, 11), (99, 12, 12)]


def test_own_layers_begin_where_the_states_are_known() -> None:
    window, one = SlotWindow(N_CTX, reads_states=True), sequence("a", list(range(20)))
    assert window.follow(one, ROOM, 15) == 5
    assert window.tail(N_CTX) == [(i, i - 15, i) for i in range(15, 20)]
    feed(window)
    one.tokens.append(70)
    assert window.follow(one, ROOM, 15) == 1
    assert window.tail(N_CTX) == [(70, 5, 20)]
    one.tokens.extend([71, 72])
    assert window.follow(one, ROOM, 22) == 1
    assert window.tail(N_CTX) == [(72, 0, 22)]


@given(
    n_prompt=st.integers(1, 200),
    grown=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(0, ROOM)),
        max_size=60,
    ),
    chunk=st.integers(1, 64),
)
def test_the_cells_are_always_of_the_text_and_never_too_many(
    n_prompt: int, grown: list[tuple[list[int], int]], chunk: int
) -> None:
    window, one = SlotWindow(N_CTX), sequence("a", [n % 4 for n in range(n_prompt)])
    for new, n_guessed in grown:
        n_behind = window.follow(one, ROOM)
        assert 1 <= n_behind <= N_SINK + N_CTX // 2
        window.cut()
        fed = [token for token, *_ in window.tail(chunk)]
        window.fed(fed)
        if len(fed) == n_behind:
            n_last = len(window.cells) - N_SINK
            assert window.cells[:N_SINK] == list(one.tokens[:N_SINK])
            assert n_last <= 0 or window.cells[N_SINK:] == list(one.tokens[-n_last:])
            for guess in range(n_guessed):
                window.fed([guess % 4], guessed=True)
        assert len(window.cells) <= N_CTX
        one.tokens.extend(new)


def test_a_pass_that_fails_leaves_nothing_to_propose_behind() -> None:
    """To catch up and to propose are two passes of one step."""
    drafter = Drafter(FakeDraft(len, n_slots=1, n_ctx=N_CTX, fail_on=[5]), 1, Progress())
    one = sequence("a", list(range(30)))
    one.slot_id = 0
    drafter.begin([one], ROOM)
    drafter.catch_up([one], math.inf)
    assert drafter.propose([one], 3) == {}
    one.tokens[5] = 6
    drafter.begin([one], ROOM)
    assert drafter.propose([one], 1) == {"a": (16,)}
