"""Which running sequence gives its slot to another client's: by tables, and over simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from serve_app.engine.core.sequence import Sequence
from tests.unit.engine.policy.slots import Slots, free, sequence

TOKEN_S = 0.01


@dataclass
class Simulation(Slots):
    """Each step takes as long, and gets every running sequence one token."""

    ended: list[Sequence] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    n_preempted: int = 0
    n_thought: int = 0
    served: Counter[str] = field(default_factory=Counter)
    """Tokens by client."""

    def come(self, *names: str, n_tokens: int = 100) -> None:
        made = (sequence(name, TOKEN_S * (1 + n_tokens), n_tokens=n_tokens) for name in names)
        self.arrive(*made)

    def n_live(self, client: str) -> int:
        return sum(one.request.client == client for one in (*self.running, *self.waiting))

    def end(self, one: Sequence) -> None:
        """End a sequence of a client that nobody expects back."""
        self.running.remove(one)
        self.policy.leave(one.request)

    def step(self) -> None:
        for loser in self.give_back():
            self.n_preempted += 1
            first = next(self.policy.next(self.waiting, self.running, self))
            assert first is not loser, "it would get its slot again"
        for one in self.policy.next(self.waiting, self.running, self):
            self.occupy(one)
            self.started.setdefault(one.id, self.now)
        self.now += TOKEN_S
        for one in list(self.running):
            self.policy.charge(one, TOKEN_S / len(self.running))
            self.served[one.request.client] += 1
            one.n_generated += 1
            if one.n_left == 0:
                self.end(one)
                self.ended.append(one)

    def held(self) -> Counter[str]:
        return Counter(one.request.client for one in self.running)


def keep_busy(simulation: Simulation, client: str, n_live: int, n_tokens: int) -> None:
    """The client has so many requests at any time."""
    for n in range(simulation.n_live(client), n_live):
        simulation.come(f"{client}{simulation.now:.2f}.{n}", n_tokens=n_tokens)


def ask_again(simulation: Simulation, client: str, n_tokens: int) -> str | None:
    """The client, which has one request at a time, thinks for a while between two: the new one's name."""
    if simulation.n_live(client) or simulation.n_thought < 5:
        simulation.n_thought += not simulation.n_live(client)
        return None
    simulation.n_thought = 0
    name = f"{client}{simulation.now:.2f}"
    simulation.come(name, n_tokens=n_tokens)
    return name


def test_one_client_alone_keeps_all_its_slots() -> None:
    simulation = Simulation(4)
    for _ in range(3000):
        keep_busy(simulation, "a", 12, 500)
        simulation.step()
    assert simulation.n_preempted == 0
    assert len(simulation.ended) > 20


@pytest.mark.parametrize("n_slots", [2, 3, 8])
def test_one_request_at_a_time_never_waits_beside_many(n_slots: int) -> None:
    simulation = Simulation(n_slots, cost_s=lambda one: 0.002)
    asked: dict[str, float] = {}
    for _ in range(6000):
        keep_busy(simulation, "a", 40, 500)
        if name := ask_again(simulation, "b", 20):
            asked[name] = simulation.now
        simulation.step()
    waits = [simulation.started[name] - at for name, at in asked.items()]
    assert max(waits) < 3 * TOKEN_S
    assert len(waits) > 200
    assert simulation.n_preempted > 100
    assert simulation.served["a"] > 0.95 * 6000 * (n_slots - 1), "nor do many starve"
    assert sum(one.request.client == "a" for one in simulation.ended) >= 11 * (n_slots - 1)


@pytest.mark.parametrize(("n_slots", "clients"), [(8, "ab"), (7, "ab"), (6, "abc"), (2, "abc")])
def test_slots_and_time_are_shared_alike(n_slots: int, clients: str) -> None:
    """The first client is there a while before the others."""
    simulation = Simulation(n_slots, cost_s=lambda one: 0.002)
    for _ in range(100):
        keep_busy(simulation, "a", 20, 300)
        simulation.step()
    before = Counter(simulation.served)
    assert simulation.held() == {"a": n_slots}
    for _ in range(5000):
        for client in clients:
            keep_busy(simulation, client, 20, 300)
        simulation.step()
    shares = simulation.served - before
    assert sum(shares.values()) == 5000 * n_slots
    for client in clients:
        assert shares[client] == pytest.approx(5000 * n_slots / len(clients), rel=0.1)


def test_with_one_slot_clients_take_turns_by_quanta() -> None:
    simulation = Simulation(1, cost_s=lambda one: 0.05)
    for _ in range(8000):
        for client in "ab":
            keep_busy(simulation, client, 3, 5000)
        simulation.step()
    assert simulation.served["a"] == pytest.approx(simulation.served["b"], rel=0.1)
    assert 20 <= simulation.n_preempted <= simulation.now / 2


def test_what_it_costs_to_store_and_restore_sets_the_pace() -> None:
    """A tenth of the time at most: half a second each, no more often than every five seconds."""
    simulation = Simulation(4, cost_s=lambda one: 0.5)
    for _ in range(3000):
        keep_busy(simulation, "a", 12, 500)
        ask_again(simulation, "b", 20)
        simulation.step()
    assert 4 <= simulation.n_preempted <= 3000 * TOKEN_S / (9 * 0.5) + 1


def table(running: str, waiting: str) -> tuple[Slots, list[Sequence]]:
    """Sequences are `a0 a1*5`: what the decoder did for one, in seconds, is behind the star; those that
    run came in that order."""
    slots = Slots(len(running.split()))
    for number, word in enumerate(running.split()):
        name, _, spent_s = word.partition("*")
        one = sequence(name, 0)
        slots.arrive(one)
        slots.occupy(one).trace.admitted = 1.0 + number
        one.spent_s = float(spent_s or 0)
    for one in slots.running:
        slots.policy._accounts.charge(one.request.account, one.spent_s)
    slots.arrive(*(sequence(name, 0) for name in waiting.split()))
    return slots, list(slots.running)


def loser(slots: Slots, cost_s: Callable[[Sequence], float | None] = free) -> Sequence | None:
    slots.cost_s = cost_s
    return next(iter(slots.give_back()), None)


@pytest.mark.parametrize(
    ("running", "waiting", "gives_way"),
    [
        pytest.param("a0*1 a1*1", "", None, id="nobody waits"),
        pytest.param("a0*1 a1*1", "a2", None, id="its own client's"),
        pytest.param("b0*1 a0*1 a1*1 b1*1", "c0", None, id="nobody is ahead of who has just come"),
        pytest.param("a0*1 a1*1 b0", "b1", None, id="one slot more, for a second"),
        pytest.param("a0*1 a1*2 b0", "b1", "a1", id="one slot more, for a quantum"),
        pytest.param("a0*1 a1*1 a2*1 b0", "b1", "a2", id="two more: the youngest"),
        pytest.param("a0*1 a1*1 a2*1 b0*4", "b1", None, id="but it has less due"),
        pytest.param("a0*1 a1*1 b0*1 b1*1 b2*1", "c0 a2", "b2", id="of who has most due"),
        pytest.param("a0*9 b0", "b1", None, id="as many slots"),
    ],
)
def test_who_gives_way(running: str, waiting: str, gives_way: str | None) -> None:
    slots, _ = table(running, waiting)
    one = loser(slots)
    assert (one.id if one else None) == gives_way


def test_urgent_ones_and_those_that_take_too_long_keep_their_slots() -> None:
    slots, made = table("a0*1 a1*1 a2*1 b0", "b1")
    assert loser(slots, lambda one: None) is None
    slow = {"a2": None, "a1": 0.1}
    assert loser(slots, lambda one: slow.get(one.id, 0.0)) is made[1]
    urgent, _ = table("a0*1 a1*1", "")
    urgent.arrive(sequence("c0", 0, priority=1))
    assert loser(urgent) is None


def test_the_next_one_gives_way_later() -> None:
    slots, made = table("a0*1 a1*1 a2*1 a3*1", "b0 b1")
    slots.policy.charge(made[0], 1.0)
    for now, expected in ((10.0, made[3]), (10.8, None), (10.95, made[2])):
        slots.now = now
        assert loser(slots, lambda one: 0.1) is expected
        for one in slots.waiting[:1] if expected else ():
            slots.occupy(next(waiting for waiting in slots.waiting if waiting.id[0] == "b"))
            assert one is expected


@pytest.mark.parametrize(
    ("running", "waiting", "n_slots", "given"),
    [
        pytest.param("A0 A1 B0", "c0", 3, "B0", id="the youngest"),
        pytest.param("A0 A1 B0", "c0 d0", 3, "A1 B0", id="as many as lack"),
        pytest.param("A0 A1 B0", "c0 d0 e0 f0", 3, "A0 A1 B0", id="not more than there are"),
        pytest.param("A0 A1 B0", "c0 d0", 4, "B0", id="one slot is idle"),
        pytest.param("A0 b0", "C0 C1", 2, "", id="not for each other"),
        pytest.param("a0 b0", "c0", 2, "", id="only what is behind"),
    ],
)
def test_what_is_behind_gives_its_slots_to_all_others(
    running: str, waiting: str, n_slots: int, given: str
) -> None:
    """Capital ones are in the background."""
    slots = Slots(n_slots)
    for number, name in enumerate(running.split()):
        one = sequence(name, 0, background=name[0].isupper())
        slots.arrive(one)
        slots.occupy(one).trace.admitted = 1.0 + number
    slots.arrive(*(sequence(name, 0, background=name[0].isupper()) for name in waiting.split()))
    assert " ".join(one.id for one in slots.give_back()) == given
