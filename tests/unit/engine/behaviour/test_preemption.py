"""A cache that is full, or a client with more than its share: somebody gives way, nobody is lost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.base.errors import CacheFullError
from serve_app.base.values.answers import FinishReason
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.engine import make_guests
from serve_app.engine.policy import policy
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    PATIENCE_S,
    Inbox,
    SteppedBackend,
    ask,
    continuation,
    endless,
    options,
    request,
    running,
    start,
    start_together,
)


@settings(max_examples=60)
@example(
    [("aa", 5), ("a" * 6, 1), ("a" * 6, 1), ("a" * 19, 1), ("a" * 8 + "b" + "a" * 11, 4)], 48, 200
)
@given(
    prompts=st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=20), st.integers(1, 20)),
        min_size=1,
        max_size=8,
    ),
    n_cells=st.integers(48, 120),
    cache_ram_bytes=st.sampled_from([0, 200, 100_000]),
)
def test_every_answer_is_as_if_it_had_been_alone(
    prompts: list[tuple[str, int]], n_cells: int, cache_ram_bytes: int
) -> None:
    backend = FakeBackend(endless, n_slots=4, n_cells=n_cells)
    sizes = options(4, n_ctx_slot=48, max_waiting=8, cache_ram_bytes=cache_ram_bytes)
    with running(backend, sizes) as engine:
        inboxes = start(
            engine, *(request(str(i), text, max_tokens=n) for i, (text, n) in enumerate(prompts))
        )
        for inbox, (text, max_tokens) in zip(inboxes, prompts, strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(text.encode(), max_tokens)


@pytest.mark.parametrize("cache_ram_bytes", [0, 100_000])
def test_the_youngest_waits_and_goes_on(cache_ram_bytes: int) -> None:
    backend = FakeBackend(endless, n_slots=2, n_cells=40)
    sizes = options(2, n_ctx_slot=40, cache_ram_bytes=cache_ram_bytes)
    loop = DecoderLoop(lambda: backend, sizes, make_guests)
    old, young = start_together(
        loop, request("old", "a" * 9, max_tokens=20), request("young", "b" * 9, max_tokens=20)
    )
    loop.close(PATIENCE_S)
    assert loop.stats().requests.preemptions == 1
    assert loop.stats().tokens.restored_tokens == (0 if cache_ram_bytes == 0 else 19)
    for inbox, letter in ((old, b"a"), (young, b"b")):
        assert inbox.token_ids == continuation(letter * 9, 20)
        assert (inbox.end.usage.prompt_tokens, inbox.end.usage.completion_tokens) == (9, 20)
        assert inbox.end.usage.cached_tokens == 0


def test_idle_slots_give_way_first() -> None:
    backend = FakeBackend(endless, n_slots=2, n_cells=40)
    with running(backend, options(2, n_ctx_slot=40)) as engine:
        ask(engine, request("gone", "a" * 20))
        assert ask(engine, request("b", "b" * 20, max_tokens=15)).token_ids == continuation(
            b"b" * 20, 15
        )
        assert engine.stats().requests.preemptions == 0
        assert sorted(slot.n_past for slot in engine.stats().slots) == [0, 34]


def test_one_that_can_never_fit_ends_alone() -> None:
    backend = FakeBackend(endless, n_slots=2, n_cells=10)
    with running(backend, options(2, n_ctx_slot=60)) as engine:
        end = ask(engine, request("big", "a" * 30)).end
        assert end.reason == FinishReason.ERROR
        assert isinstance(end.error, CacheFullError)
        assert ask(engine, request("small", "ab")).token_ids == continuation(b"ab", 4)


def preempted() -> tuple[SteppedBackend, DecoderLoop, list[Inbox]]:
    """Two sequences, of which the younger has just lost its slot."""
    backend = SteppedBackend(n_slots=2)
    backend._n_cells = 40
    loop = DecoderLoop(
        lambda: backend, options(2, n_ctx_slot=40, max_stall_ms=math.inf), make_guests
    )
    inboxes = start_together(
        loop, request("old", "a" * 9, max_tokens=25), request("young", "b" * 9, max_tokens=25)
    )
    backend.wait_for_batch()
    while loop.stats().requests.preemptions == 0:
        backend.step()
    assert (loop.stats().queue.running, loop.stats().queue.waiting) == (1, 1)
    return backend, loop, inboxes


def test_abort_while_it_waits() -> None:
    backend, loop, (old, young) = preempted()
    loop.abort("young")
    backend.resume()
    loop.close(PATIENCE_S)
    assert young.end.reason == FinishReason.ABORT
    assert old.token_ids == continuation(b"a" * 9, 25)
    assert backend.open_samplers == 0


def test_drain_ends_it_too() -> None:
    backend, loop, inboxes = preempted()
    loop._command_queue.drain(0.0)
    backend.resume()
    loop.close(0)
    assert {inbox.end.reason for inbox in inboxes} == {FinishReason.ERROR}
    assert backend.open_samplers == 0


def test_nobody_is_admitted_until_somebody_ends() -> None:
    backend, loop, (old, young) = preempted()
    (late,) = start_together(loop, request("late", "c", max_tokens=1))
    backend.step()
    backend.step()
    assert (loop.stats().queue.running, loop.stats().queue.waiting) == (1, 2)
    backend.resume()
    loop.close(PATIENCE_S)
    assert late.token_ids == continuation(b"c", 1)
    assert old.token_ids == continuation(b"a" * 9, 25)
    assert young.token_ids == continuation(b"b" * 9, 25)


# -- a client with more than its share --------------------------------------------------------------


def both_slots_of_one_client(
    client: str = "", max_stall_ms: float = 250
) -> tuple[SteppedBackend, DecoderLoop, list[Inbox]]:
    """Two running sequences of `a`, and a request of another client, or of its own."""
    backend = SteppedBackend(n_slots=2)
    sizes = options(2, n_ctx_slot=64, cache_ram_bytes=100_000, max_stall_ms=max_stall_ms)
    loop = DecoderLoop(lambda: backend, sizes, make_guests)
    inboxes = start_together(
        loop, *(replace(request(name, name * 20, max_tokens=30), client="a") for name in ("a", "b"))
    )
    for _ in range(4):
        backend.wait_for_batch()
        backend.release()
    backend.wait_for_batch()
    other = replace(request("other", "c" * 9, max_tokens=5), client=client)
    return backend, loop, inboxes + start_together(loop, other)


def test_a_client_with_all_slots_gives_one_back_and_gets_it_again() -> None:
    backend, loop, (old, young, other) = both_slots_of_one_client("z")
    while loop.stats().requests.preemptions == 0:
        backend.step()
    assert (loop.stats().queue.running, loop.stats().queue.waiting) == (2, 1)
    backend.resume()
    loop.close(PATIENCE_S)
    assert loop.stats().tokens.restored_tokens > 20
    assert other.token_ids == continuation(b"c" * 9, 5)
    assert old.token_ids == continuation(b"a" * 20, 30)
    assert young.token_ids == continuation(b"b" * 20, 30)
    assert (old.end.timings.n_preemptions, young.end.timings.n_preemptions) == (0, 1)
    assert other.end.timings.n_preemptions == 0


def test_a_client_alone_is_never_preempted() -> None:
    backend, loop, inboxes = both_slots_of_one_client("a")
    backend.resume()
    loop.close(PATIENCE_S)
    assert loop.stats().requests.preemptions == 0
    assert [inbox.end.reason for inbox in inboxes] == [FinishReason.LENGTH] * 3


def test_nobody_gives_way_whose_state_takes_too_long_to_save() -> None:
    """Bytes take 2 ns until that was measured."""
    backend, loop, inboxes = both_slots_of_one_client("z", max_stall_ms=1e-06)
    backend.resume()
    loop.close(PATIENCE_S)
    assert loop.stats().requests.preemptions == 0
    assert [inbox.end.reason for inbox in inboxes] == [FinishReason.LENGTH] * 3


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(
            st.sampled_from("xyz"), st.text("ab", min_size=1, max_size=20), st.integers(1, 20)
        ),
        min_size=1,
        max_size=12,
    ),
    n_slots=st.integers(1, 4),
    n_cells=st.none() | st.integers(48, 120),
    cache_ram_bytes=st.sampled_from([0, 200, 100_000]),
    measured=st.booleans(),
)
def test_answers_of_many_clients_are_as_if_each_had_been_alone(
    prompts: list[tuple[str, str, int]],
    n_slots: int,
    n_cells: int | None,
    cache_ram_bytes: int,
    measured: bool,
) -> None:
    backend = FakeBackend(endless, n_slots=n_slots, n_cells=n_cells)
    if measured:
        backend.profile = Profile({1: 1e-4, 4: 2e-4}, {1: 1e-4, 16: 2e-4})
    sizes = options(n_slots, n_ctx_slot=48, max_waiting=12, cache_ram_bytes=cache_ram_bytes)
    with running(backend, sizes) as engine:
        requests = [
            replace(request(str(i), text, max_tokens=n), client=client)
            for i, (client, text, n) in enumerate(prompts)
        ]
        for inbox, one in zip(start(engine, *requests), requests, strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            n_tokens = one.sampling.max_tokens or 0
            assert inbox.token_ids == continuation(bytes(one.prompt), n_tokens)


def test_who_is_back_at_once_finds_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "EXPECTED_S", 3600)
    backend = SteppedBackend(n_slots=2)
    with running(backend, options(2, max_waiting=8, max_stall_ms=math.inf)) as engine:
        greedy = [replace(request(f"m{i}", max_tokens=40), client="m") for i in range(2)]
        polite = [replace(request(f"h{i}", max_tokens=2), client="h") for i in range(2)]
        start(engine, greedy[0])
        backend.wait_for_batch()
        (first,) = start(engine, polite[0])
        start(engine, greedy[1])
        while not first.ended:
            backend.step()
        for _ in range(3):
            backend.step()
        assert (engine.stats().queue.running, engine.stats().queue.waiting) == (1, 1)
        (second,) = start(engine, polite[1])
        while not second.ended:
            backend.step()
        assert engine.stats().requests.preemptions == 0
