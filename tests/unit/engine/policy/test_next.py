"""Who is next for a slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.core.sequence import Sequence
from serve_app.engine.policy.policy import EXPECTED_S
from tests.unit.engine.policy.slots import Slots, sequence, with_waiting


def test_one_client_is_first_come_first_served() -> None:
    assert with_waiting(*(sequence(f"a{n}") for n in range(4))).admit_all() == "a0 a1 a2 a3"


def test_who_comes_goes_before_one_that_gave_way_and_has_slots_and_as_much_due() -> None:
    slots = with_waiting(*(sequence(f"a{n}") for n in range(3)))
    running = [slots.admit(), slots.admit()]
    for one in running:
        slots.policy.charge(one, one.expected_s)  # so that nothing more is expected of them
    slots.preempt(running[1], for_another=True)
    slots.arrive(sequence("b0"))
    assert slots.names == "b0 a1 a2"


def test_a_client_with_many_does_not_hold_up_one_with_few() -> None:
    many = [sequence(f"a{n}") for n in range(4)]
    slots = with_waiting(*many, sequence("b0"), sequence("b1"))
    assert slots.admit_all() == "a0 b0 a1 b1 a2 a3"


def test_what_requests_cost_counts_not_their_number() -> None:
    long = [sequence(f"a{n}", 30) for n in range(2)]
    short = [sequence(f"b{n}", 10) for n in range(5)]
    assert with_waiting(*long, *short).admit_all() == "a0 b0 b1 b2 a1 b3 b4"


def test_their_number_counts_where_nothing_was_measured() -> None:
    slots = with_waiting(*(sequence(name, 0) for name in ("a0", "a1", "a2", "b0", "b1")))
    assert slots.names == "a0 b0 a1 b1 a2"


def test_priority_goes_before_fairness() -> None:
    slots = with_waiting(sequence("a0"), sequence("b0", priority=1), sequence("a1", priority=-1))
    assert slots.admit_all() == "a1 a0 b0"


def test_who_was_away_has_saved_nothing_up() -> None:
    slots = with_waiting(*(sequence(f"a{n}") for n in range(6)))
    for _ in range(4):
        served = slots.admit()
        slots.policy.charge(served, 10)
        slots.end(served)
    slots.arrive(*(sequence(f"b{n}") for n in range(4)))
    assert slots.admit_all() == "a4 b0 a5 b1 b2 b3"


def test_who_has_many_slots_waits_until_others_have_as_many() -> None:
    slots = with_waiting(*(sequence(f"a{n}") for n in range(6)))
    for _ in range(3):
        slots.admit()
    slots.arrive(*(sequence(f"b{n}") for n in range(5)))
    assert slots.admit_all() == "b0 b1 b2 a3 b3 a4 b4 a5"


def test_what_was_measured_counts_not_what_was_expected() -> None:
    slots = with_waiting(sequence("a0", 50), sequence("b0", 20), sequence("a1"), sequence("b1"))
    cheap = slots.admit()
    assert cheap.id == "a0"
    slots.policy.charge(cheap, 1)  # nearly all of it was found in the cache
    slots.end(cheap)
    assert slots.names == "b0 a1 b1"
    dear = slots.admit()
    slots.policy.charge(dear, 500)
    assert slots.names == "a1 b1"
    slots.arrive(sequence("a2", 50))
    assert slots.names == "a1 a2 b1"


def test_who_lost_its_slot_goes_first_and_pays_once() -> None:
    slots = with_waiting(sequence("a0"), sequence("a1", priority=-5), sequence("b0", 15))
    preempted = slots.admit()
    assert preempted.id == "a1"
    assert slots.names == "b0 a0"
    slots.preempt(preempted, for_another=False)
    assert slots.names == "a1 b0 a0"
    assert slots.admit() is preempted
    slots.policy.charge(preempted, 4)
    slots.arrive(sequence("b1"), sequence("a2"))
    assert slots.names == "b0 a0 b1 a2", "a has 10 due, of what it was to cost, and b1 15"


def test_who_gave_way_waits_for_its_clients_turn_before_its_other_requests() -> None:
    slots = with_waiting(sequence("a0"), sequence("a1"), sequence("a2"))
    slots.admit()
    second = slots.admit()
    slots.arrive(sequence("b0"))
    slots.preempt(second, for_another=True)
    assert slots.names == "b0 a1 a2"


def test_what_another_engine_began_goes_before_all_new_ones() -> None:
    first, late = sequence("a0"), sequence("b0", 99)
    late.lost_slot = True
    assert with_waiting(first, late).names == "b0 a0"


def test_clients_without_requests_are_forgotten() -> None:
    slots = with_waiting(sequence("a0"), sequence("b0"))
    slots.end(slots.admit())
    slots.end(slots.waiting[0])  # it left while it waited
    assert slots.policy._accounts.active == 0


class Small(Slots):
    """Slots that have room for so many seconds in all, and for no sequence of a hundred."""

    most_s = 30.0

    def fits(self, sequence: Sequence) -> bool:
        return sequence.expected_s < 100

    def has_room(self, sequence: Sequence, held: Sequence | None = None) -> bool:
        beside_s = 0.0 if held is None or not self.fits(held) else held.expected_s
        used_s = sum(one.expected_s for one in self.running)
        return sequence.expected_s + max(used_s, beside_s) <= self.most_s


@pytest.mark.parametrize(
    ("waiting", "names"),
    [
        pytest.param((10, 10, 10), "a0 a1 a2", id="all fit"),
        pytest.param((25, 10, 5), "a0 a2", id="the short one fits beside it"),
        pytest.param((100, 10), "a1", id="until the cache is changed"),
        pytest.param((31, 10), "", id="it would keep the first one waiting"),
    ],
)
def test_who_has_no_room_lets_those_pass_with_which_it_would_fit(
    waiting: tuple[float, ...], names: str
) -> None:
    slots = Small(4)
    slots.arrive(*(sequence(f"a{n}", expected_s) for n, expected_s in enumerate(waiting)))
    admitted = []
    for one in slots.policy.next(slots.waiting, slots.running, slots):
        admitted.append(slots.occupy(one).id)
    assert " ".join(admitted) == names


def test_what_is_behind_does_not_take_the_room_that_another_waits_for() -> None:
    slots = Small(4)
    slots.arrive(sequence("a0", 100), sequence("b0", background=True), sequence("c0"))
    assert slots.names == "c0"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(2, 50), st.integers(0, 3)), max_size=30),
    st.integers(1, 4),
)
def test_everybody_is_served_and_nobody_gets_far_ahead(
    arrivals: list[tuple[str, int, int]], n_slots: int
) -> None:
    """`arrivals` are (client, cost, admissions that pass before the next one comes)."""
    slots, admitted = Slots(), 0

    def step() -> None:
        nonlocal admitted
        if len(slots.running) == n_slots:
            slots.end(slots.running[0])
        if slots.waiting:
            slots.admit()
            admitted += 1

    for n, (client, cost, steps) in enumerate(arrivals):
        slots.arrive(sequence(f"{n}", cost, client=client))
        for _ in range(steps):
            step()
    for _ in range(2 * len(arrivals) + n_slots):
        step()
    assert admitted == len(arrivals)
    assert not slots.waiting


@pytest.mark.parametrize(
    ("n_slots", "running", "left", "client", "n_kept"),
    [
        (4, "mmm", "", "m", 0),
        (4, "mmm", "a", "m", 1),
        (4, "mm", "a", "m", 1),
        (4, "m", "a", "m", 0),  # it may have two
        (4, "mmm", "a", "b", 0),  # it has nothing
        (4, "mm", "ab", "m", 2),
        (4, "m", "abcd", "m", 2),  # half of them at most
        (1, "m", "a", "m", 0),
    ],
)
def test_who_has_its_share_leaves_slots_to_those_who_have_just_left(
    n_slots: int, running: str, left: str, client: str, n_kept: int
) -> None:
    slots = Slots(n_slots, now=5.0)
    for name in left:
        slots.arrive(sequence(name))
        slots.end(slots.admit())
    slots.now = 5.1
    slots.arrive(*(sequence(name) for name in running))
    for one in list(slots.waiting):
        slots.occupy(one)
    slots.arrive(sequence("x"))
    slots.give_back()
    assert slots.policy._n_kept(client, slots.running) == n_kept


def test_slots_stay_free_until_clients_are_back_or_late() -> None:
    slots = Slots(8)
    for name, at in (("a", 0.0), ("b", 0.1)):
        slots.arrive(sequence(name))
        one = slots.admit()
        slots.now = at
        slots.end(one)
    slots.running = [sequence("m")] * 7
    slots.arrive(sequence("m"))

    def is_admitted(now: float) -> bool:
        slots.now = now
        slots.give_back()
        return "m" in slots.names

    assert not is_admitted(0.2)
    slots.arrive(sequence("b"))
    assert not is_admitted(0.2)
    assert is_admitted(EXPECTED_S)


def test_nothing_is_admitted_until_one_ends_if_the_cache_was_full() -> None:
    slots = with_waiting(*(sequence(name) for name in ("a0", "b0")))
    old, young = slots.admit(), slots.admit()
    young.trace.admitted = 9.0
    assert slots.policy.gives_room(slots.running) is young
    slots.preempt(young, for_another=False)
    slots.arrive(sequence("c0"))
    assert slots.names == ""
    assert slots.give_back() == []
    slots.end(old)
    assert slots.names == "b0 c0"


def test_background_gives_room_first_and_waits_alone() -> None:
    slots = with_waiting(*(sequence(name, background=name == "b0") for name in ("a0", "b0")))
    old, young = slots.admit(), slots.admit()
    old.trace.admitted = 9.0
    assert slots.policy.gives_room(slots.running) is young
    slots.preempt(young, for_another=False)
    slots.arrive(sequence("c0"))
    assert slots.names == "c0"
    slots.preempt(old, for_another=False)  # there is another cache
    assert slots.give_back() == []
    assert slots.names == "a0 c0 b0"
