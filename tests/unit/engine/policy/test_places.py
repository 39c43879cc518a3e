"""Who may wait when all places are taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.policy.places import Places

ACCEPTED, REFUSED = (True, None), (False, None)


def filled(taken: str, running: str = "", *, n_places: int = 6, n_extra: int = 1) -> Places[str]:
    """Requests are `a0 b0 a1`, of the client that their letter names; those of `running` have a slot."""
    capacity = Places[str](n_places, n_extra)
    for request_id in taken.split():
        capacity.take(request_id, request_id[0], may_lose=True)
    for request_id in running.split():
        assert capacity.start(request_id)
    return capacity


@pytest.mark.parametrize(
    ("taken", "running", "client", "verdict"),
    [
        pytest.param("a0 a1 a2 a3 a4", "", "a", ACCEPTED, id="not full"),
        pytest.param("a0 a1 a2 a3 a4 a5", "", "a", REFUSED, id="its own are the most"),
        pytest.param("a0 a1 a2 a3 a4 a5", "", "b", (True, "a5"), id="a first one"),
        pytest.param("a0 a1 a2 a3 b0 b1", "", "b", (True, "a3"), id="fewer by two"),
        pytest.param("a0 a1 a2 b0 b1 b2", "", "b", REFUSED, id="as many"),
        pytest.param("a0 a1 a2 b0 b1 c0", "", "b", REFUSED, id="it would have more"),
        pytest.param("a0 a1 a2 b0 b1 c0", "", "c", (True, "a2"), id="of who has most"),
        pytest.param("a0 a1 a2 a3 b0 b1", "a3 a2", "c", (True, "a1"), id="only who waits"),
        pytest.param(
            "a0 a1 a2 a3 b0 b1", "a0 a1 a2 a3", "c", (True, "b1"), id="of the next greedy"
        ),
        pytest.param("a0 a1 a2 a3 a4 a5", "a0 a1 a2 a3 a4 a5", "b", ACCEPTED, id="an extra place"),
        pytest.param(
            "a0 a1 a2 a3 a4 b0", "a0 a1 a2 a3 a4", "b", REFUSED, id="only for a first one"
        ),
        pytest.param("a0 b0 c0 d0 e0 f0", "", "g", REFUSED, id="all have one"),
    ],
)
def test_who_gets_a_place(
    taken: str, running: str, client: str, verdict: tuple[bool, str | None]
) -> None:
    assert filled(taken, running).ask(client) == verdict


def test_extra_places_end() -> None:
    capacity = filled("a0 a1", "a0 a1", n_places=2, n_extra=1)
    assert capacity.ask("b") == ACCEPTED
    capacity.take("b0", "b")
    assert capacity.ask("c") == REFUSED


def test_one_that_was_to_get_a_slot_in_the_same_moment_gets_none() -> None:
    capacity = filled("a0 a1 a2 a3 a4 a5")
    capacity.leave("a5")
    capacity.take("b0", "b", may_lose=True)
    assert capacity.held == {"a": 5, "b": 1}
    assert not capacity.start("a5")
    assert capacity.start("a4")
    assert capacity.ask("c") == (True, "a3"), "one that has a slot keeps its place"
    capacity.leave("a5")
    assert capacity.held == {"a": 5, "b": 1}


def test_what_another_engine_began_is_not_displaced() -> None:
    capacity = Places[str](2, 0)
    for name in ("a0", "a1"):
        capacity.take(name, "a")
    assert capacity.ask("b") == REFUSED


@given(
    st.lists(
        st.tuples(st.sampled_from(["arrive", "start", "leave", "end"]), st.integers(0, 5)),
        max_size=80,
    )
)
def test_places_are_bounded_and_never_lost(events: list[tuple[str, int]]) -> None:
    """`cancel` ends any live request, `end` the one displaced first."""
    capacity = Places[str](4, 2)
    live: dict[str, str] = {}
    ending: list[str] = []
    running: set[str] = set()
    for n, (event, number) in enumerate(events):
        client, request_id = "abcdef"[number], f"{'abcdef'[number]}{n}"
        chosen = list(live)[number % len(live)] if live else None
        if event == "arrive":
            had, (accepted, displaced) = dict(capacity.held), capacity.ask(client)
            if client not in had and max(had.values(), default=0) >= 2 and sum(had.values()) < 6:
                assert accepted, "who has nothing is not refused beside who has several"
            if displaced is not None:
                assert displaced in live
                assert displaced not in running
                assert displaced not in ending
                capacity.leave(displaced)
                ending.append(displaced)
            if accepted:
                capacity.take(request_id, client, may_lose=True)
                live[request_id] = client
                assert capacity.held[client] <= max(capacity.held.values())
        elif event == "start" and chosen is not None and len(running) < 2:
            assert capacity.start(chosen) == (chosen not in ending)
            if chosen not in ending:
                running.add(chosen)
        elif event == "leave" and chosen is not None:
            capacity.leave(chosen)
            del live[chosen]
            running.discard(chosen)
            ending = [one for one in ending if one != chosen]
        elif event == "end" and ending:
            capacity.leave(ending[0])
            del live[ending.pop(0)]
        assert sum(capacity.held.values()) == len(live) - len(ending)
        assert len(live) - len(ending) <= 4 + 2
    for request_id in live:
        capacity.leave(request_id)
    assert not capacity.held
