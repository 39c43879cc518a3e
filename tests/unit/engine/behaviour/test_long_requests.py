"""A request may be longer than a slot's share of the cache: up to what all slots have together."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.errors import PromptTooLongError
from serve_app.base.values.answers import FinishReason, SequenceEnd, TokenDelta
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.choice.plan import Mode
from serve_app.engine.core import loop
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.engine.costs.traffic import Traffic
from serve_app.engine.guests import cache_mode_switcher
from serve_app.engine.guests.cache_mode_switcher import CacheModeSwitcher
from serve_app.engine.policy.policy import SlotPolicy
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    Inbox,
    are_accepted,
    ask,
    continuation,
    endless,
    options,
    request,
    running,
    start,
    submit,
    until,
)

SPLIT, UNIFIED = Mode(True, False), Mode(True, True)
PROFILE = Profile({1: 0.001, 4: 0.001}, {1: 0.001, 16: 0.001})
POOLED = options(4, n_ctx_slot=64, n_ctx=64, max_stall_ms=math.inf, max_waiting=16)
"""Four slots, whose shares are 16 tokens."""


def pooled(mode: Mode = SPLIT) -> FakeBackend:
    """A backend with so many cells in either kind of cache."""
    backend = FakeBackend(endless, n_slots=4, n_cells=64)
    backend.mode, backend.fills_gaps = mode, not mode.kv_unified
    backend.n_share, backend.profile = 16, PROFILE
    backend.other = (SPLIT if mode is UNIFIED else UNIFIED), PROFILE
    return backend


def letters(n: int, seed: int = 0) -> str:
    return "".join(random.Random(f"{n} {seed}").choices("abcdefgh", k=n))


@pytest.mark.parametrize("n_prompt", [16, 17, 40, 63])
def test_a_prompt_longer_than_a_share_has_the_cells_of_others(n_prompt: int) -> None:
    backend, prompt = pooled(), letters(n_prompt)
    with running(backend, POOLED) as engine:
        short = ask(engine, request("short", "abc", max_tokens=5))
        assert backend.mode == SPLIT
        n = min(4, 64 - n_prompt)
        inbox = ask(engine, request("long", prompt, max_tokens=4))
        assert inbox.token_ids == continuation(prompt.encode(), n)
        assert inbox.end.reason == FinishReason.LENGTH
        assert short.token_ids == continuation(b"abc", 5)
        assert backend.mode == UNIFIED
        assert "longer than a slot's share" in engine.stats().compute.mode_reason


def test_one_token_more_than_all_cells_is_refused() -> None:
    with running(pooled(), POOLED) as engine, pytest.raises(PromptTooLongError) as caught:
        submit(engine, request("long", letters(64)), Inbox())
    assert caught.value.details == {"n_prompt_tokens": 64, "n_ctx": 64}


def test_an_answer_may_grow_past_a_share() -> None:
    """It goes on where it was, and so does the stream beside it."""
    backend = pooled()
    with running(backend, POOLED) as engine:
        inboxes = start(
            engine, request("long", "abc", max_tokens=30), request("short", "xy", max_tokens=12)
        )
        for inbox, prompt, n in zip(inboxes, (b"abc", b"xy"), (30, 12), strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(prompt, n)
        assert backend.mode == UNIFIED


def test_an_answer_without_a_bound_ends_with_the_last_cell() -> None:
    with running(pooled(), POOLED) as engine:
        inbox = ask(engine, request("long", "abc", max_tokens=None))
        assert inbox.token_ids == continuation(b"abc", 61)
        assert inbox.end.reason == FinishReason.LENGTH


def test_the_next_turn_computes_only_its_own_tokens() -> None:
    with running(pooled(), POOLED) as engine:
        prompt = letters(40)
        first = ask(engine, request("first", prompt, max_tokens=4))
        turn = prompt + bytes(first.token_ids).decode() + "more"
        assert ask(engine, request("next", turn)).end.usage.cached_tokens == 43


@pytest.mark.parametrize(("patience_s", "n_expected"), [(60.0, 0), (0.02, 1)])
def test_streams_leave_a_gap_or_are_interrupted_in_the_end(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, n_expected: int
) -> None:
    """The change takes longer than streams may wait. It comes when the stream ended, or later."""

    def script(tokens: Sequence[int]) -> int:
        if (
            len(tokens) == 4 and bytes(tokens[:2]) == b"ab"
        ):  # however late this test's own thread is
            submit(engine, request("long", prompt), long)
        time.sleep(0.005)
        return endless(tokens)

    monkeypatch.setattr(cache_mode_switcher, "_PATIENCE_S", patience_s)
    backend, prompt, long = pooled(), letters(40), Inbox()
    backend._script, backend.change_s = script, 9.0
    with running(backend, POOLED) as engine:
        (stream,) = start(engine, request("stream", "ab", max_tokens=13))
        long.wait()
        assert long.token_ids == continuation(prompt.encode(), 4)
        assert stream.wait().timings.n_preemptions == n_expected
        assert stream.token_ids == continuation(b"ab", 13)
        assert backend.mode == UNIFIED


def test_the_cache_stays_unified_while_the_chat_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_REST_S", 0.0)
    slow = Profile({1: 1.0, 4: 4.0}, {1: 0.5, 16: 1.0})
    backend = pooled()
    with running(backend, POOLED) as engine:
        ask(engine, request("long", letters(40)))
        change = engine.core.guest(CacheModeSwitcher)
        change._not_before = 0.0

        def short_ones(name: str) -> None:
            change._traffic = Traffic((UNIFIED, CostModel(slow)), (SPLIT, PROFILE))
            inboxes = start(engine, *(request(f"{name}{i}", letters(9, i)) for i in range(4)))
            assert {inbox.wait().reason for inbox in inboxes} == {FinishReason.LENGTH}

        short_ones("a")
        assert backend.mode == UNIFIED
        change._long_until = 0.0  # some minutes later
        short_ones("b")
        until(lambda: backend.mode == SPLIT)


def test_without_memory_for_a_unified_cache_a_long_request_is_too_long() -> None:
    class Cramped(FakeBackend):
        def change(self, reason: str, learned: Profile) -> None:
            self.slots, self.other = [[] for _ in self.slots], None

    backend = Cramped(endless, n_slots=4, n_cells=64)
    backend.mode, backend.n_share, backend.profile = SPLIT, 16, PROFILE
    backend.other = UNIFIED, PROFILE
    with running(backend, POOLED) as engine:
        for name in ("first", "second"):
            error = ask(engine, request(name, letters(40))).end.error
            assert isinstance(error, PromptTooLongError)
            assert error.details == {"n_prompt_tokens": 40, "n_ctx": 16}
        assert ask(engine, request("short", "ab")).token_ids == continuation(b"ab", 4)


# -- beside others ----------------------------------------------------------------------------------


def test_of_two_that_do_not_fit_together_the_second_waits() -> None:
    """Nobody is preempted for it. A short one passes that fits beside it; one that does not, waits too."""
    backend = pooled(UNIFIED)
    backend.hold()
    with running(backend, POOLED) as engine:
        prompts = {"a": letters(40), "b": letters(30, 1), "short": "abc", "too much": letters(36)}
        inboxes = start(engine, request("a", prompts["a"], max_tokens=8))
        until(lambda: backend.n_waiting == 1)
        inboxes += start(engine, *(request(name, prompts[name]) for name in ("b", "short")))
        inboxes += start(engine, request("too much", prompts["too much"]))
        backend.resume()
        for inbox, prompt, n in zip(inboxes, prompts.values(), (8, 4, 4, 4), strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(prompt.encode(), n)
        queued_s = [inbox.end.timings.queue_s for inbox in inboxes]
        assert engine.stats().requests.preemptions == 0
        assert queued_s[2] < min(queued_s[1], queued_s[3])


@pytest.mark.parametrize("mode", [SPLIT, UNIFIED])
def test_short_ones_that_keep_coming_do_not_keep_a_long_one_waiting(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the cache changed before there is room for it. Clients are charged alike for each batch,
    however long the machine takes, so that they have their turns in the same order."""
    charge = SlotPolicy.charge
    monkeypatch.setattr(SlotPolicy, "charge", lambda queue, seq, _s: charge(queue, seq, 0.001))
    backend = pooled(mode)
    backend.hold()
    ended: dict[str, SequenceEnd] = {}

    def short(i: int) -> GenerationRequest:
        return replace(request(f"short{i}", letters(9, i), max_tokens=6), client=f"{i % 3}")

    def entry(one: GenerationRequest) -> tuple[GenerationRequest, Callable[[TokenDelta], None]]:
        def sink(delta: TokenDelta) -> None:
            if delta.end is not None:
                ended[one.id] = delta.end

        return one, sink

    long = replace(request("long", letters(50), max_tokens=6), client="long")
    with running(backend, POOLED) as engine:
        assert are_accepted(engine.submit_to([entry(short(i)) for i in range(4)]))
        until(lambda: backend.n_waiting == 1)
        later = [entry(long), *(entry(short(i)) for i in range(4, 12))]
        assert are_accepted(engine.submit_to(later))
        backend.resume()
        until(lambda: len(ended) == 13)
    assert list(ended).index("long") <= 5
    assert ended["long"].timings.n_preemptions == 0


def test_what_another_one_has_needs_no_room() -> None:
    """Four answers to one long prompt share its cells."""
    with running(pooled(UNIFIED), POOLED) as engine:
        prompt = letters(50)
        inboxes = start(engine, *(request(str(i), prompt, max_tokens=3) for i in range(4)))
        for inbox in inboxes:
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(prompt.encode(), 3)


def test_what_is_in_the_background_makes_room_at_once() -> None:
    backend = pooled(UNIFIED)
    with running(backend, POOLED) as engine:
        behind = request("behind", letters(30), max_tokens=20)
        (slow,) = start(engine, replace(behind, background=True))
        until(lambda: bool(slow.deltas))
        prompt = letters(40)
        assert ask(engine, request("long", prompt)).token_ids == continuation(prompt.encode(), 4)
        assert slow.wait().timings.n_preemptions == 1
        assert slow.token_ids == continuation(letters(30).encode(), 20)


def test_what_is_in_the_background_makes_room_once() -> None:
    """A stream keeps the long one waiting all the same. Until that runs, nobody in the background comes
    back to lose the slot again in the next step."""
    backend = pooled(UNIFIED)
    backend.hold()
    with running(backend, POOLED) as engine:
        stream, slow = (
            request(name, letters(n), max_tokens=n) for name, n in (("a", 25), ("b", 9))
        )
        inboxes = start(engine, stream, replace(slow, background=True))
        until(lambda: backend.n_waiting == 1)
        inboxes += start(engine, request("long", letters(40)))
        backend.resume()
        assert {inbox.wait().reason for inbox in inboxes} == {FinishReason.LENGTH}
        for inbox, n, n_answer in zip(inboxes, (25, 9, 40), (25, 9, 4), strict=True):
            assert inbox.token_ids == continuation(letters(n).encode(), n_answer)
        assert [inbox.end.timings.n_preemptions for inbox in inboxes] == [0, 1, 0]


@settings(max_examples=60)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8),
    cache_ram_bytes=st.sampled_from([0, 200, 100_000]),
)
def test_every_answer_is_as_if_it_had_been_alone(
    prompts: list[tuple[int, int]], cache_ram_bytes: int
) -> None:
    backend = pooled()
    sizes = options(
        4,
        n_ctx_slot=64,
        n_ctx=64,
        max_waiting=8,
        cache_ram_bytes=cache_ram_bytes,
        max_stall_ms=math.inf,
    )
    with running(backend, sizes) as engine:
        inboxes = start(
            engine,
            *(request(str(i), letters(n, i), max_tokens=k) for i, (n, k) in enumerate(prompts)),
        )
        for i, (inbox, (n, k)) in enumerate(zip(inboxes, prompts, strict=True)):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(letters(n, i).encode(), min(k, 64 - n))
