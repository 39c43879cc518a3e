"""What is in the background gets what others leave, and they do not notice it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.errors import QueueFullError
from serve_app.base.values.answers import FinishReason
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.core.command_queue import Command, CommandQueue
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.engine import make_guests
from serve_app.engine.policy.forecast import Forecast
from serve_app.engine.policy.policy import SlotPolicy
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    PATIENCE_S,
    Inbox,
    SteppedBackend,
    WatchedBackend,
    are_accepted,
    ask,
    assert_only_own_tokens_were_fed,
    continuation,
    endless,
    options,
    request,
    running,
    start,
    start_together,
    submit,
    until,
)

FORECAST = Forecast(n_slots=1, prompt_token_s=0, token_s=0, n_generated=1)


def behind(name: str, prompt: str = "hello\n", *, max_tokens: int = 4) -> GenerationRequest:
    return replace(request(name, prompt, max_tokens=max_tokens), background=True)


def ended_in(order: list[str]) -> Callable[[GenerationRequest], Inbox]:
    """Inboxes that write down in which order their requests ended."""

    class Noting(Inbox):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __call__(self, delta: object) -> None:
            super().__call__(delta)  # type: ignore[arg-type]
            if self.ended:
                order.append(self.name)

    return lambda one: Noting(one.id)


def test_whoever_comes_goes_first_whatever_the_priority() -> None:
    order: list[str] = []
    backend, inbox = WatchedBackend(n_slots=1), ended_in(order)
    backend.hold()
    with running(backend, options(1, max_waiting=4)) as engine:
        first = replace(behind("first"), priority=-5)
        asked = [first, replace(behind("second"), priority=-5), request("somebody")]
        inboxes = [inbox(one) for one in asked]
        for one, its in zip(asked, inboxes, strict=True):
            submit(engine, one, its)
        backend.resume()
        for its in inboxes:
            its.wait()
    assert order == ["somebody", "first", "second"]
    assert_only_own_tokens_were_fed(backend)


@pytest.mark.parametrize(("client", "is_first"), [("other", True), ("greedy", False)])
def test_a_flood_takes_its_own_share_and_not_the_one_of_another_clients_batch(
    client: str, is_first: bool
) -> None:
    order: list[str] = []
    backend, inbox = SteppedBackend(n_slots=2), ended_in(order)
    flood = [
        replace(request(f"flood-{n}", "a\n", max_tokens=30), client="greedy") for n in range(8)
    ]
    lines = [replace(behind(f"line-{n}", "b\n"), client=client) for n in range(4)]
    with running(backend, options(2, max_waiting=16)) as engine:
        inboxes = [inbox(one) for one in [*flood, *lines]]
        for one, its in zip([*flood, *lines], inboxes, strict=True):
            submit(engine, one, its)
        backend.resume()
        for its in inboxes:
            its.wait()
    assert (max(order.index(line.id) for line in lines) < order.index("flood-4")) == is_first
    if not is_first:
        assert order[-4:] == [line.id for line in lines]


def test_what_a_line_leaves_takes_no_room_from_what_people_said() -> None:
    backend = FakeBackend(endless, n_slots=1, n_cells=999)
    with running(backend, options(1, n_ctx_slot=99, cache_ram_bytes=100_000)) as engine:
        ask(engine, request("somebody", "a" * 40, max_tokens=1))
        for name in "xyz":
            ask(engine, behind(name, name * 40, max_tokens=1))
        assert engine.stats().cache.stored_prefixes == 1
        again = ask(engine, request("again", "a" * 45, max_tokens=1))
        assert engine.stats().cache.stored_prefixes == 1
    assert again.end.usage.cached_tokens == 40


def test_a_slot_is_given_back_with_what_it_has() -> None:
    """Its state is stored, and nothing of its answer is computed twice."""
    backend = SteppedBackend(n_slots=1)
    loop = DecoderLoop(lambda: backend, options(1, cache_ram_bytes=100_000), make_guests)
    (patient,) = start_together(loop, behind("patient", "a" * 19, max_tokens=20))
    backend.wait_for_batch()
    for _ in range(5):
        backend.step()
    (somebody,) = start_together(loop, request("somebody", "b" * 9))
    backend.resume()
    assert somebody.wait().reason is FinishReason.LENGTH
    loop.close(PATIENCE_S)
    assert loop.stats().requests.preemptions == 1
    assert loop.stats().tokens.restored_tokens > 19
    assert somebody.token_ids == continuation(b"b" * 9, 4)
    assert patient.token_ids == continuation(b"a" * 19, 20)
    assert patient.end.timings.n_preemptions == 1


def test_a_pass_in_the_background_is_left_when_somebody_comes() -> None:
    """It would never end, as it is held."""
    backend = WatchedBackend(n_slots=2)
    backend.hold()
    with running(backend) as engine:
        (patient,) = start(engine, behind("patient", "abcdefgh"))
        until(lambda: backend.n_waiting == 1)
        (somebody,) = start(engine, request("somebody", "xyz"))
        until(lambda: bool(backend.batches) and backend.n_waiting == 1)
        backend.resume()
        somebody.wait()
        assert [row[0] for row in backend.batches[1]] == list(b"xyz")
        assert patient.wait().reason is FinishReason.LENGTH
    assert patient.token_ids == continuation(b"abcdefgh", 4)


def test_only_what_nobody_waits_for_is_left() -> None:
    command_queue, said = CommandQueue(SlotPolicy(options(9))), list[bool]()
    command_queue.cancel_with(said.append)

    def submit(one: GenerationRequest) -> EngineSequence:
        sequence = EngineSequence(one, Inbox())
        assert are_accepted(command_queue.submit([sequence], FORECAST))
        return sequence

    a, b = submit(behind("a")), submit(request("b"))
    command_queue.take(0.0)
    with command_queue.computing([a, b]):
        submit(request("c"))
        assert not any(said), "b is waited for"
    command_queue.take(0.0)
    with command_queue.computing([a]):
        submit(behind("d"))
        assert not any(said), "d has time"
        submit(request("e"))
        assert said.pop()
    command_queue.take(0.0)
    with command_queue.computing([a]):
        assert not said.pop()
        command_queue.run_between_steps(Command(lambda _: None))
        assert not any(said)
        command_queue.run_between_steps(Command(lambda _: None, is_urgent=True))
        assert said.pop()


def test_while_somebody_is_served_nothing_else_is_computed() -> None:
    """There are slots for both; nothing says that rows cost nothing."""
    backend = SteppedBackend(n_slots=2)
    with running(backend) as engine:
        patient, somebody = start(
            engine, behind("patient", "a", max_tokens=9), request("somebody", "b" * 20)
        )
        backend.resume()
        somebody.wait()
        assert patient.wait().reason is FinishReason.LENGTH
    (its_slot,) = (one.slot for one in backend.tenancies if len(one.prompt) == 20)
    slots = [row[2] for batch in backend.batches for row in batch]
    n_until_its_end = len(slots) - slots[::-1].index(its_slot)
    assert n_until_its_end <= 20 + 3 + 2, (
        "the patient one had a step before the other came, at most"
    )
    assert patient.token_ids == continuation(b"a", 9)
    assert somebody.token_ids == continuation(b"b" * 20, 4)


def test_a_full_queue_in_the_background_is_nobody_elses() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend, options(1, max_waiting=1)) as engine:
        patient = start(engine, *(behind(f"p{i}") for i in range(2)))
        with pytest.raises(QueueFullError):
            submit(engine, behind("too much"), Inbox())
        others = start(engine, request("a"), request("b"))
        with pytest.raises(QueueFullError):
            submit(engine, request("c"), Inbox())
        backend.resume()
        ended = [one.wait().reason for one in (*others, *patient)]
        assert set(ended) == {FinishReason.LENGTH}


def test_statistics_tell_them_apart() -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, max_waiting=4)) as engine:
        asked = behind("a"), behind("b"), request("c", max_tokens=9), request("d")
        inboxes = start(engine, *asked)
        while engine.stats().queue.running == 0:
            backend.step_if_any()
        stats = engine.stats()
        assert (stats.queue.running, stats.queue.waiting) == (1, 1)
        assert (stats.queue.background_running, stats.queue.background_waiting) == (0, 2)
        backlogs = stats.queue.backlog_s, stats.queue.background_backlog_s
        assert max(backlogs) < 0.1, "only the picking of tokens was measured"
        assert [slot.background for slot in stats.slots] == [False]
        backend.resume()
        for inbox in inboxes:
            inbox.wait()
        assert sum(engine.latencies()["ttft_s"].values()) == 2, "nobody waited for the others"


def test_a_prompt_does_not_wait_for_a_prefix_in_the_background() -> None:
    """It computes what is missing itself, from where the other one is."""
    backend = SteppedBackend(n_slots=2)
    loop = DecoderLoop(lambda: backend, options(2, n_batch=8, max_stall_ms=math.inf), make_guests)
    (patient,) = start_together(loop, behind("patient", "a" * 40))
    backend.wait_for_batch()
    for _ in range(3):
        backend.step()
    (somebody,) = start_together(loop, request("somebody", "a" * 41))
    backend.resume()
    loop.close(PATIENCE_S)
    assert somebody.token_ids == continuation(b"a" * 41, 4)
    assert patient.token_ids == continuation(b"a" * 40, 4)
    assert 24 <= somebody.end.usage.cached_tokens <= 32


@settings(max_examples=60)
@given(
    asked=st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=20), st.integers(1, 20), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    n_cells=st.one_of(st.none(), st.integers(48, 120)),
    cache_ram_bytes=st.sampled_from([0, 200, 100_000]),
)
def test_every_answer_is_as_if_it_had_been_alone(
    asked: list[tuple[str, int, bool]], n_cells: int | None, cache_ram_bytes: int
) -> None:
    """Whoever loses a slot for whomever, and even if the cache is too small for all."""
    backend = FakeBackend(endless, n_slots=4, n_cells=n_cells)
    sizes = options(4, n_ctx_slot=48, max_waiting=8, cache_ram_bytes=cache_ram_bytes)
    with running(backend, sizes) as engine:
        requests = [
            replace(request(str(i), text, max_tokens=n), background=background)
            for i, (text, n, background) in enumerate(asked)
        ]
        inboxes = start(engine, *requests)
        for inbox, (text, max_tokens, _) in zip(inboxes, asked, strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(text.encode(), max_tokens)
        stats = engine.stats()
        assert (stats.queue.background_running, stats.queue.background_waiting) == (0, 0)
