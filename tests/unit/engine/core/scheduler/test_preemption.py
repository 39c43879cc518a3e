"""Which running sequence gives its slot to another client's: by tables, and over simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from serve_app.engine.core.scheduler.fair_queue import (
    EXPECTED_S,
    Accounts,
    FairQueue,
    PreemptionPolicy,
    SlotShares,
)
from serve_app.engine.core.sequence import Sequence
from serve_app.sampling import SamplingParams
from serve_app.types import GenerationRequest

TOKEN_S = 0.01


def sequence(name: str, n_tokens: int = 100, priority: int = 0) -> Sequence:
    """A request of its first letter's client."""
    sampling = SamplingParams(max_tokens=n_tokens)
    request = GenerationRequest(name, (1,), sampling, client=name[0], priority=priority)
    return Sequence(request, lambda delta: None)


def free(one: Sequence) -> float | None:
    return 0.0


@dataclass
class Simulation:
    """Slots and a clock: each step takes as long, and gets every running sequence one token."""

    n_slots: int
    cost_s: Callable[[Sequence], float | None] = free
    now: float = 0.0
    running: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    n_preempted: int = 0
    n_thought: int = 0
    served: Counter[str] = field(default_factory=Counter)
    """Tokens by client."""

    def __post_init__(self) -> None:
        self.accounts = Accounts()
        self.waiting = FairQueue(lambda n_prompt, n: TOKEN_S * (n_prompt + n), self.accounts)
        self.policy = PreemptionPolicy()

    def arrive(self, *names: str, n_tokens: int = 100) -> None:
        self.waiting.extend(sequence(name, n_tokens) for name in names)

    def n_live(self, client: str) -> int:
        all_of_them = [*self.running, *self.waiting.waiting]
        return sum(one.request.client == client for one in all_of_them)

    def step(self) -> None:
        if len(self.running) == self.n_slots:
            loser = self.policy.find(self.waiting, self.running, self.cost_s, self.now)
            if loser is not None:
                self.n_preempted += 1
                self.running.remove(loser)
                self.waiting.put_back(loser, for_another=True)
                assert next(iter(self.waiting)) is not loser, "it would get its slot again"
        for one in self.waiting:
            if len(self.running) == self.n_slots:
                break
            self.waiting.admit(one)
            one.trace.admitted = one.trace.admitted or self.now + 1e-9
            self.started.setdefault(one.id, self.now)
            self.running.append(one)
        self.now += TOKEN_S
        for one in list(self.running):
            self.waiting.charge(one, TOKEN_S / len(self.running))
            self.served[one.request.client] += 1
            one.n_generated += 1
            if one.n_left == 0:
                self.running.remove(one)
                self.waiting.end(one)
                self.ended.append(one)

    def held(self) -> Counter[str]:
        return Counter(one.request.client for one in self.running)


def keep_busy(simulation: Simulation, client: str, n_live: int, n_tokens: int) -> None:
    """The client has so many requests at any time."""
    for n in range(simulation.n_live(client), n_live):
        simulation.arrive(f"{client}{simulation.now:.2f}.{n}", n_tokens=n_tokens)


def ask_again(simulation: Simulation, client: str, n_tokens: int) -> str | None:
    """The client, which has one request at a time, thinks for a while between two: the new one's name."""
    if simulation.n_live(client) or simulation.n_thought < 5:
        simulation.n_thought += not simulation.n_live(client)
        return None
    simulation.n_thought = 0
    name = f"{client}{simulation.now:.2f}"
    simulation.arrive(name, n_tokens=n_tokens)
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


def table(running: str, waiting: str) -> tuple[FairQueue, list[Sequence]]:
    """Sequences are `a0 a1*5`: what the decoder did for one, in seconds, is behind the star; those that
    run came in that order."""
    queue = FairQueue(lambda n_prompt, n: 0.0, Accounts())
    made = []
    for number, word in enumerate(running.split()):
        name, _, spent_s = word.partition("*")
        made.append(sequence(name))
        made[-1].spent_s, made[-1].trace.admitted = float(spent_s or 0), 1.0 + number
    queue.extend(made)
    for one in made:
        queue.admit(one)
        queue.charge(one, one.spent_s)
    queue.extend(sequence(name) for name in waiting.split())
    return queue, made


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
    queue, made = table(running, waiting)
    found = PreemptionPolicy().find(queue, made, free, 0.0)
    assert (found.id if found else None) == gives_way


def test_urgent_ones_and_those_that_take_too_long_keep_their_slots() -> None:
    queue, made = table("a0*1 a1*1 a2*1 b0", "b1")
    assert PreemptionPolicy().find(queue, made, lambda one: None, 0.0) is None
    slow = {"a2": None, "a1": 0.1}
    found = PreemptionPolicy().find(queue, made, lambda one: slow.get(one.id, 0.0), 0.0)
    assert found is made[1]
    queue.extend([sequence("c0", priority=1)])
    urgent, all_run = table("a0*1 a1*1", "")
    urgent.extend([sequence("c0", priority=1)])
    assert PreemptionPolicy().find(urgent, all_run, free, 0.0) is None


def test_the_next_one_gives_way_later() -> None:
    queue, made = table("a0*1 a1*1 a2*1 a3*1", "b0 b1")
    queue.charge(made[0], 1.0)
    policy = PreemptionPolicy()
    assert policy.find(queue, made, lambda one: 0.1, now=10.0) is made[3]
    assert policy.find(queue, made, lambda one: 0.1, now=10.8) is None
    assert policy.find(queue, made, lambda one: 0.1, now=10.95) is made[3]


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
    shares = SlotShares(n_slots)
    for one in left:
        shares.left(one, 5.0)
    assert shares.n_kept(client, [sequence(one) for one in running], 5.1) == n_kept


def test_it_ends_when_they_are_back_or_late() -> None:
    shares, running = SlotShares(8), [sequence("m")] * 7
    shares.left("a", 0.0)
    shares.left("b", 0.1)
    assert shares.n_kept("m", running, 0.2) == 2
    shares.came("b")
    assert shares.n_kept("m", running, 0.2) == 1
    assert shares.n_kept("m", running, EXPECTED_S) == 0
