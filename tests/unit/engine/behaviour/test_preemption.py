"""A cache that is full: somebody gives way, nobody is lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.engine.backends.fake import FakeBackend
from serve_app.engine.loop import DecoderLoop
from serve_app.errors import CacheFullError
from serve_app.types import FinishReason
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


@settings(max_examples=150)
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
            engine,
            *(request(str(i), text, max_tokens=n) for i, (text, n) in enumerate(prompts)),
        )
        for inbox, (text, max_tokens) in zip(inboxes, prompts, strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(text.encode(), max_tokens)


@pytest.mark.parametrize("cache_ram_bytes", [0, 100_000])
def test_the_youngest_waits_and_goes_on(cache_ram_bytes: int) -> None:
    backend = FakeBackend(endless, n_slots=2, n_cells=40)
    sizes = options(2, n_ctx_slot=40, cache_ram_bytes=cache_ram_bytes)
    loop = DecoderLoop(lambda: backend, sizes)
    old, young = start_together(
        loop, request("old", "a" * 9, max_tokens=20), request("young", "b" * 9, max_tokens=20)
    )
    loop.drain(PATIENCE_S)
    assert loop.stats.preemptions == 1
    assert loop.stats.restored_tokens == (0 if cache_ram_bytes == 0 else 19)
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
        assert engine.stats().preemptions == 0
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
    loop = DecoderLoop(lambda: backend, options(2, n_ctx_slot=40, max_stall_s=None))
    inboxes = start_together(
        loop, request("old", "a" * 9, max_tokens=25), request("young", "b" * 9, max_tokens=25)
    )
    backend.wait_for_batch()
    while loop.stats.preemptions == 0:
        backend.step()
    assert (loop.stats.running, loop.stats.waiting) == (1, 1)
    return backend, loop, inboxes


def test_abort_while_it_waits() -> None:
    backend, loop, (old, young) = preempted()
    loop.abort("young")
    backend.resume()
    loop.drain(PATIENCE_S)
    assert young.end.reason == FinishReason.ABORT
    assert old.token_ids == continuation(b"a" * 9, 25)
    assert backend.open_samplers == 0


def test_drain_ends_it_too() -> None:
    backend, loop, inboxes = preempted()
    loop._command_queue.drain(0.0)
    backend.resume()
    loop.drain(0)
    assert {inbox.end.reason for inbox in inboxes} == {FinishReason.ERROR}
    assert backend.open_samplers == 0


def test_nobody_is_admitted_until_somebody_ends() -> None:
    backend, loop, (old, young) = preempted()
    (late,) = start_together(loop, request("late", "c", max_tokens=1))
    backend.step()
    backend.step()
    assert (loop.stats.running, loop.stats.waiting) == (1, 2)
    backend.resume()
    loop.drain(PATIENCE_S)
    assert late.token_ids == continuation(b"c", 1)
    assert old.token_ids == continuation(b"a" * 9, 25)
    assert young.token_ids == continuation(b"b" * 9, 25)
