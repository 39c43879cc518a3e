"""Who is next for a slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.core.scheduler.fair_queue import Accounts, FairQueue
from serve_app.engine.core.sequence import Sequence
from serve_app.sampling import SamplingParams
from serve_app.types import GenerationRequest


def sequence(
    name: str, n_tokens: int = 10, *, client: str | None = None, priority: int = 0
) -> Sequence:
    """A request of its first letter's client that costs its tokens."""
    sampling = SamplingParams(max_tokens=1)
    prompt = tuple(range(n_tokens - 1))
    request = GenerationRequest(name, prompt, sampling, client or name[0], priority)
    return Sequence(request, lambda delta: None)


def queue(*sequences: Sequence, accounts: Accounts | None = None) -> FairQueue:
    made = FairQueue(lambda n_prompt, n_generated: n_prompt + n_generated, accounts or Accounts())
    made.extend(sequences)
    return made


def admit(waiting: FairQueue) -> Sequence:
    """The first one gets a slot."""
    first = next(iter(waiting))
    waiting.admit(first)
    first.trace.admitted = 0.0
    return first


def names(waiting: FairQueue) -> str:
    """All that wait, in order."""
    return " ".join(one.id for one in waiting)


def admit_all(waiting: FairQueue) -> str:
    names = []
    while len(waiting):
        first = next(iter(waiting))
        waiting.admit(first)
        names.append(first.id)
    return " ".join(names)


def test_one_client_is_first_come_first_served() -> None:
    assert admit_all(queue(*(sequence(f"a{n}") for n in range(4)))) == "a0 a1 a2 a3"


def test_who_comes_goes_before_one_that_gave_way_and_has_slots_and_as_much_due() -> None:
    waiting = queue(*(sequence(f"a{n}") for n in range(3)))
    running = [admit(waiting), admit(waiting)]
    for one in running:
        waiting.charge(one, one.expected_s)  # so that nothing more is expected of them
    waiting.put_back(running[1], for_another=True)
    waiting.extend([sequence("b0")])
    assert names(waiting) == "b0 a1 a2"


def test_a_client_with_many_does_not_hold_up_one_with_few() -> None:
    many = [sequence(f"a{n}") for n in range(4)]
    assert admit_all(queue(*many, sequence("b0"), sequence("b1"))) == "a0 b0 a1 b1 a2 a3"


def test_what_requests_cost_counts_not_their_number() -> None:
    long = [sequence(f"a{n}", 30) for n in range(2)]
    short = [sequence(f"b{n}", 10) for n in range(5)]
    assert admit_all(queue(*long, *short)) == "a0 b0 b1 b2 a1 b3 b4"


def test_priority_goes_before_fairness() -> None:
    waiting = queue(sequence("a0"), sequence("b0", priority=1), sequence("a1", priority=-1))
    assert admit_all(waiting) == "a1 a0 b0"


def test_who_was_away_has_saved_nothing_up() -> None:
    waiting = queue(*(sequence(f"a{n}") for n in range(6)))
    for _ in range(4):
        served = admit(waiting)
        waiting.charge(served, 10)
        waiting.end(served)
    waiting.extend(sequence(f"b{n}") for n in range(4))
    assert admit_all(waiting) == "a4 b0 a5 b1 b2 b3"


def test_who_has_many_slots_waits_until_others_have_as_many() -> None:
    waiting = queue(*(sequence(f"a{n}") for n in range(6)))
    for _ in range(3):
        admit(waiting)
    waiting.extend(sequence(f"b{n}") for n in range(5))
    assert admit_all(waiting) == "b0 b1 b2 a3 b3 a4 b4 a5"


def test_what_was_measured_counts_not_what_was_expected() -> None:
    waiting = queue(sequence("a0", 50), sequence("b0", 20), sequence("a1"), sequence("b1"))
    cheap = admit(waiting)
    assert cheap.id == "a0"
    waiting.charge(cheap, 1)  # nearly all of it was found in the cache
    waiting.end(cheap)
    assert names(waiting) == "b0 a1 b1"
    dear = admit(waiting)
    waiting.charge(dear, 500)
    assert names(waiting) == "a1 b1"
    waiting.extend([sequence("a2", 50)])
    assert names(waiting) == "a1 a2 b1"


def test_who_was_preempted_goes_first_and_pays_once() -> None:
    waiting = queue(sequence("a0"), sequence("a1", priority=-5), sequence("b0"))
    preempted = list(waiting)[1]
    waiting.admit(preempted)
    preempted.trace.admitted = 0.0
    due_s = waiting.due_s("a")
    waiting.put_back(preempted)
    assert next(iter(waiting)) is preempted
    waiting.admit(preempted)
    assert waiting.due_s("a") == due_s == 10


def test_who_gave_way_waits_for_its_clients_turn_before_its_other_requests() -> None:
    waiting = queue(sequence("a0"), sequence("a1"), sequence("a2"))
    first, second = admit(waiting), admit(waiting)
    waiting.extend([sequence("b0")])
    assert (waiting.due_s("a"), waiting.due_s("a", without=second)) == (20, 10)
    waiting.put_back(second, for_another=True)
    assert names(waiting) == "b0 a1 a2"
    waiting.charge(first, 4)
    assert waiting.due_s("a") == 10, "of what it was to cost"


def test_clients_without_requests_are_forgotten() -> None:
    accounts = Accounts()
    waiting = queue(sequence("a0"), sequence("b0"), accounts=accounts)
    left = list(waiting)[1]
    waiting.end(admit(waiting))
    waiting.end(left)  # it left while it waited
    assert accounts.active == 0
    assert len(waiting) == 0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(2, 50), st.integers(0, 3)), max_size=30),
    st.integers(1, 4),
)
def test_everybody_is_served_and_nobody_gets_far_ahead(
    arrivals: list[tuple[str, int, int]], n_slots: int
) -> None:
    """`arrivals` are (client, cost, admissions that pass before the next one comes)."""
    waiting = queue()
    running: list[Sequence] = []
    served: dict[str, int] = {}
    admitted = 0

    def step() -> None:
        nonlocal admitted
        if len(running) == n_slots:
            waiting.end(running.pop(0))
        if len(waiting):
            clients = {s.request.client for s in waiting}
            first = next(iter(waiting))
            waiting.admit(first)
            running.append(first)
            admitted += 1
            served[first.request.client] = served.get(first.request.client, 0) + 1
            assert first.request.client in clients

    for n, (client, cost, steps) in enumerate(arrivals):
        waiting.extend([sequence(f"{n}", cost, client=client)])
        for _ in range(steps):
            step()
    for _ in range(2 * len(arrivals) + n_slots):
        step()
    assert admitted == len(arrivals)
    assert len(waiting) == 0


def test_dear_samplers_count_before_they_were_paid() -> None:
    first, second = sequence("a0"), sequence("a1")
    first.sampling_cost.observe(1, 15.0)
    waiting = queue(first, second, sequence("b0"), sequence("b1"))
    assert admit_all(waiting) == "a0 b0 b1 a1"
