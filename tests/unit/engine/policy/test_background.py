"""What is in the background: behind all others, but for its share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.base.values.requests import account
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.engine.policy.forecast import Backlog
from tests.unit.engine.policy.slots import rank, sequence, with_waiting


def test_who_is_waited_for_is_next() -> None:
    slots = with_waiting(
        sequence("a1", background=True, priority=-9),
        sequence("a2", priority=9),
        sequence("b1", background=True),
        sequence("b2"),
    )
    assert slots.names == "b2 a2 a1 b1"


@pytest.mark.parametrize(
    ("asked", "background", "ahead"),
    [
        pytest.param("a b c d", "e1 e2", "", id="all keep to their shares"),
        pytest.param("m m m m m m", "m1 m2", "", id="nobody loses to itself"),
        pytest.param("m m m m m", "e1 e2 e3 e4 e5", "e1 e2 e3 e4", id="half of eight slots"),
        pytest.param("m m m m m", "e1 f1 e2 f2 f3", "e1 f1 e2 f2", id="a third, for each"),
        pytest.param("m m m a b c e", "e1 f1 f2", "f1", id="its other request has its share"),
        pytest.param("m m " + " ".join("abcdghijk"), "e1 e2", "e1", id="a slot at least"),
        pytest.param("M M M M M", "m1 e1 m2", "e1", id="its own batch has risen"),
        pytest.param("M M M M", "e1", "", id="and keeps to its share"),
    ],
)
def test_what_goes_beyond_a_share_takes_nothing_from_a_batch(
    asked: str, background: str, ahead: str
) -> None:
    """Names begin with their client's; a capital one is a batch of it that has risen."""
    people = [sequence(name) for name in asked.split()]
    for one in people:
        name = one.request.client
        risen = account(name.lower(), background=True)
        one.request = replace(one.request, client=risen if name.isupper() else name)
    lines = [sequence(name, background=True) for name in background.split()]
    rank([*people, *lines], 8)
    assert [one.request.id for one in lines if not one.is_behind] == ahead.split()
    rank(lines, 8)
    assert all(one.is_behind for one in lines)


def test_who_will_be_back_at_once_has_a_share_too() -> None:
    people = [sequence("m") for _ in range(5)]
    lines = [sequence(f"e{n}", background=True) for n in range(5)]
    rank([*people, *lines], 8, left="a")
    assert [one.is_behind for one in lines] == [False, False, True, True, True]


def test_texts_are_raised_by_the_share_of_slots() -> None:
    """Those of one client, while another asks for more slots than its share."""
    people = [sequence("m") for _ in range(5)]
    for live, client, is_raised in (
        (people, "e", True),
        (people[:2], "e", False),
        (people, "m", False),
    ):
        text = sequence(client, background=True)
        assert rank(live, 8).next_texts([text], 4, live) == [text]
        assert text.is_behind != is_raised


def test_what_a_client_has_in_the_background_is_not_held_against_it() -> None:
    patient, own, other = sequence("a1", background=True), sequence("a2"), sequence("b")
    slots = with_waiting(patient, own, other)
    slots.occupy(patient)
    slots.policy.charge(patient, 1000.0)
    slots.policy.charge(other, 1.0)
    assert slots.names == "a2 b"
    for one in (patient, own, other):
        slots.end(one)
    assert slots.policy._accounts.active == 0


def test_nobody_is_told_to_wait_for_it() -> None:
    profile = Profile(decode_s={1: 0.1, 4: 0.3}, prefill_s={16: 0.1, 64: 0.4})
    backlog = Backlog(CostModel(profile), 4)
    patient = [sequence(f"a{i}", background=True, n_tokens=9) for i in range(9)]
    forecast = backlog.forecast(patient)
    assert forecast.work_s == forecast.prefill_s == 0.0
    assert forecast.background_s > 1.0
    assert forecast.wait_s("a", {}, []) == 0.0
    own = sequence("a", n_tokens=9)
    assert backlog.forecast([*patient, own]).work_s == backlog.forecast([own]).work_s > 0
