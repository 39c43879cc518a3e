"""Who is next for a slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.scheduler.fair_queue import FairQueue
from serve_app.engine.sequence import Sequence
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


def queue(*sequences: Sequence) -> FairQueue:
    made = FairQueue(lambda n_prompt, n_generated: n_prompt + n_generated)
    made.extend(sequences)
    return made


def admit_all(waiting: FairQueue) -> str:
    names = []
    while len(waiting):
        first = next(iter(waiting))
        waiting.admit(first)
        names.append(first.id)
    return " ".join(names)


def test_one_client_is_first_come_first_served() -> None:
    assert admit_all(queue(*(sequence(f"a{n}") for n in range(4)))) == "a0 a1 a2 a3"


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
        waiting.admit(next(iter(waiting)))
    waiting.extend(sequence(f"b{n}") for n in range(4))
    assert admit_all(waiting) == "b0 a4 b1 a5 b2 b3"


def test_a_request_that_cost_less_than_expected_is_made_good() -> None:
    waiting = queue(sequence("a0", 50), sequence("b0", 20), sequence("a1"), sequence("b1"))
    first = next(iter(waiting))
    waiting.admit(first)
    assert first.id == "a0"
    first.trace.admitted = 0.0
    first.n_cached = first.n_prompt - 1  # nearly all of it was found in the cache
    waiting.end(first)
    assert admit_all(waiting) == "b0 a1 b1"


def test_who_was_preempted_goes_first_and_pays_once() -> None:
    waiting = queue(sequence("a0"), sequence("a1", priority=-5), sequence("b0"))
    preempted = list(waiting)[1]
    waiting.admit(preempted)
    preempted.trace.admitted = 0.0
    waiting.put_back(preempted)
    charged = dict(waiting._virtual)
    assert next(iter(waiting)) is preempted
    waiting.admit(preempted)
    assert waiting._virtual == charged


def test_clients_without_requests_are_forgotten() -> None:
    waiting = queue(sequence("a0"), sequence("b0"))
    running = list(waiting)
    waiting.admit(running[0])
    running[0].trace.admitted = 0.0
    waiting.end(running[0])
    waiting.end(running[1])  # it left while it waited
    assert not waiting._virtual
    assert not waiting._live
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
