"""The kind of cache changes when the traffic says so: between the tokens of streams, at rest; or never."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from serve_app.base.values.answers import FinishReason
from serve_app.engine.choice.plan import Mode
from serve_app.engine.core import loop
from serve_app.engine.costs.copy_budget import CopySpeed
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.engine.costs.traffic import Load, Traffic
from serve_app.engine.guests.cache_mode_switcher import CacheModeSwitcher
from tests.doubles.backend import FakeBackend
from tests.unit.engine.behaviour.test_pictures import GOOD, N_SEEN, asked, seeing
from tests.unit.engine.harness import (
    ask,
    continuation,
    endless,
    options,
    request,
    running,
    start,
    until,
)

# With one kind of attention, a split cache would be known to be no slower with prompts of their own.
SPLIT, UNIFIED = Mode(False, False), Mode(True, True)
SYSTEM = "You are a helpful assistant. "
SLOW = Profile({1: 1.0, 4: 4.0}, {1: 0.5, 16: 1.0})
FAST = Profile({1: 0.5, 4: 1.0}, {1: 0.5, 16: 1.0})
LARGE = options(4, n_ctx_slot=128, cache_ram_bytes=100_000, max_stall_ms=math.inf)


@pytest.fixture(autouse=True)
def costs_are_scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is learned of a backend that takes no time."""
    for method in ("observe_decode", "observe_prefill"):
        monkeypatch.setattr(CostModel, method, lambda *measured: None)


def changing(backend: FakeBackend, own: Profile = SLOW, other: Profile = FAST) -> FakeBackend:
    """A backend with a split cache, and another kind that takes other times."""
    backend.mode, backend.profile, backend.other = SPLIT, own, (UNIFIED, other)
    return backend


def said(prompts: list[str], backend: FakeBackend, n: int = 80) -> list[list[int]]:
    with running(backend, LARGE) as engine:
        inboxes = start(
            engine, *(request(str(i), text, max_tokens=n) for i, text in enumerate(prompts))
        )
        assert [inbox.wait().reason for inbox in inboxes] == [FinishReason.LENGTH] * len(prompts)
        return [inbox.token_ids for inbox in inboxes]


def test_many_that_begin_alike_change_the_cache_while_they_stream() -> None:
    backend = changing(FakeBackend(endless, n_slots=4))
    prompts = [SYSTEM + letter for letter in "abcd"]
    assert said(prompts, backend) == [continuation(text.encode(), 80) for text in prompts]
    assert backend.mode == UNIFIED
    assert "by the traffic" in backend.mode_reason


@pytest.mark.parametrize("other", [None, SLOW])
def test_without_another_kind_that_is_better_nothing_changes(other: Profile | None) -> None:
    backend = changing(FakeBackend(endless, n_slots=4))
    backend.other = None if other is None else (UNIFIED, other)
    prompts = [SYSTEM + letter for letter in "abcd"]
    assert said(prompts, backend) == [continuation(text.encode(), 80) for text in prompts]
    assert backend.mode == SPLIT


def test_a_model_that_forgets_never_changes() -> None:
    backend = changing(FakeBackend(endless, n_slots=4, forgets=True))
    prompts = [SYSTEM + letter for letter in "abcd"]
    assert said(prompts, backend) == [continuation(text.encode(), 80) for text in prompts]
    assert backend.mode == SPLIT


def part_of(profile: Profile, part: float) -> Profile:
    decode_s = {n: part * seconds for n, seconds in profile.decode_s.items()}
    return replace(profile, decode_s=decode_s)


@pytest.mark.parametrize(
    ("max_stall_ms", "change_s", "part", "n_bytes", "expected"),
    [
        (math.inf, 0.1, 1.0, 10_000, UNIFIED),
        (math.inf, 1.9, 1.0, 10_000, UNIFIED),
        (math.inf, 2.5, 1.0, 10_000, SPLIT),
        (250, 0.2, 1.0, 10_000, UNIFIED),
        (250, 0.3, 1.0, 10_000, SPLIT),
        (250, 0.2, 1.0, 300, SPLIT),  # there is room for one: the other is to be computed again
        (
            math.inf,
            0.1,
            0.04,
            10_000,
            UNIFIED,
        ),  # 100 steps save 5 s, which is more than 4 times 0.5
        (math.inf, 1.5, 0.04, 10_000, SPLIT),  # and less than 4 times 1.5
    ],
)
def test_streams_are_interrupted_for_what_saves_much_and_is_no_longer_than_they_may_wait(
    max_stall_ms: float, change_s: float, part: float, n_bytes: int, expected: Mode
) -> None:
    """Two with prompts of their own stream when the other kind is found to be better. They go on where they
    were."""

    def script(tokens: Sequence[int]) -> int:
        if bytes(tokens[:5]) == b"other" and len(tokens) == 12:
            backend.hold()
        return endless(tokens)

    backend = changing(FakeBackend(script, n_slots=4), FAST, FAST)
    backend.change_s = change_s
    own = replace(LARGE, max_stall_ms=max_stall_ms, cache_ram_bytes=n_bytes)
    with running(backend, own) as engine:
        inboxes = start(engine, *(request(text, text, max_tokens=100) for text in ("a", "other")))
        until(lambda: backend.n_waiting == 1)
        change = engine.core.guest(CacheModeSwitcher)
        slow, fast = part_of(SLOW, part), part_of(FAST, part)
        change._traffic = Traffic((SPLIT, CostModel(slow)), (UNIFIED, fast))
        backend.resume()
        for inbox, text in zip(inboxes, ("a", "other"), strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(text.encode(), 100)
        assert backend.mode == expected
        assert engine.stats().requests.preemptions == (2 if expected == UNIFIED else 0)


def test_what_is_pinned_is_saved_and_restored() -> None:
    """29 tokens of 4 bytes."""
    backend = changing(FakeBackend(endless, n_slots=5))
    backend.change_s = 0.5
    with running(backend, replace(LARGE, pinned=(tuple(SYSTEM.encode()),))) as engine:
        change = engine.core.guest(CacheModeSwitcher)
        change._cache.copies.saves = CopySpeed(1.0, 100)
        change._cache.copies.restores = CopySpeed(2.0, 100)
        assert change._cost_s() == pytest.approx(0.5 + 1.16 + 2.32)


class Watched(Traffic):
    """Keeps what it saw."""

    def __init__(self) -> None:
        super().__init__((SPLIT, CostModel(FAST)), (UNIFIED, SLOW))
        self.loads: list[Load] = []

    def observe(self, load: Load) -> None:
        self.loads.append(load)
        super().observe(load)


def test_steps_of_the_same_streams_are_alike() -> None:
    backend = changing(FakeBackend(endless, n_slots=4), FAST, SLOW)
    with running(backend, LARGE) as engine:
        engine.core.guest(CacheModeSwitcher)._traffic = watched = Watched()
        inboxes = start(engine, *(request(text, text, max_tokens=100) for text in ("a", "b", "c")))
        for inbox in inboxes:
            inbox.wait()
    streaming = [load for load in watched.loads if load.n_decoding == 3]
    assert set(streaming) == {Load(3, depth, (), 3 * depth) for depth in (0, 64, 128)}


def test_a_tile_shares_no_batch_in_either_kind() -> None:
    backend, projector = seeing()
    changing(backend, FAST, SLOW)
    projector.may_end.set()
    backend.resume()
    with running(backend, LARGE) as engine:
        engine.core.guest(CacheModeSwitcher)._traffic = watched = Watched()
        (stream,) = start(engine, request("s", max_tokens=None))
        until(lambda: len(stream.token_ids) > 2)
        (pictured,) = start(engine, asked("p", GOOD))
        pictured.wait()
    tiles = [load for load in watched.loads if N_SEEN in (n for n, _ in load.prompts)]
    assert [load.n_decoding for load in tiles] == [0]


def test_at_rest_it_changes_for_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What idle slots have is stored, and comes back; what is pinned stays."""
    monkeypatch.setattr(loop, "_REST_S", 0.0)
    pinned = tuple(SYSTEM.encode())
    prompt = "a question of its own, alone"

    def script(tokens: Sequence[int]) -> int:
        if bytes(tokens).decode() == prompt:
            backend.change_s = 4.0  # too much beside a stream
        return endless(tokens)

    backend = changing(FakeBackend(script, n_slots=5))
    backend.change_s = 15.0
    with running(backend, replace(LARGE, pinned=(pinned,))) as engine:
        inbox = ask(engine, request("a", prompt, max_tokens=12))
        until(lambda: engine.stats().compute.kv_unified)
        assert backend.slots[4] == list(pinned)
        assert backend.slots[:4] == [[]] * 4
        prompt += bytes(inbox.token_ids).decode()
        (again,) = start(engine, request("b", prompt))
        assert again.wait().usage.cached_tokens == len(prompt) - 1
        assert engine.stats().tokens.restored_tokens == len(prompt) - 1
        assert again.token_ids == continuation(prompt.encode(), 4)
        assert "by the traffic of late" in engine.stats().compute.mode_reason


def test_it_changes_back() -> None:
    backend = changing(FakeBackend(endless, n_slots=4))
    prompts = [SYSTEM + letter for letter in "abcd"]
    with running(backend, LARGE) as engine:
        for inbox in start(engine, *(request(text, text, max_tokens=80) for text in prompts)):
            inbox.wait()
        assert backend.mode == UNIFIED
        change = engine.core.guest(CacheModeSwitcher)
        change._not_before = 0.0
        change._traffic = Traffic((UNIFIED, CostModel(SLOW)), (SPLIT, FAST))
        backend.other = SPLIT, FAST
        again = [request(f"{text} again", f"{text} again", max_tokens=80) for text in prompts]
        inboxes = start(engine, *again)
        for inbox, text in zip(inboxes, prompts, strict=True):
            inbox.wait()
            assert inbox.token_ids == continuation(f"{text} again".encode(), 80)
        assert backend.mode == SPLIT


def test_a_change_that_finds_no_memory_is_the_last_one() -> None:
    class Cramped(FakeBackend):
        def change(self, reason: str, learned: Profile) -> None:
            self.slots, self.other = [[] for _ in self.slots], None

    backend = changing(Cramped(endless, n_slots=4))
    prompts = [SYSTEM + letter for letter in "abcd"]
    assert said(prompts, backend) == [continuation(text.encode(), 80) for text in prompts]
    assert backend.mode == SPLIT
