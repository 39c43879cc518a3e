"""While nobody waits, doubtful batches are tried again; who comes does not wait for that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from serve_app.base.errors import CacheFullError
from serve_app.base.types import FinishReason
from serve_app.engine.backends.base import Row
from serve_app.engine.core import loop
from serve_app.engine.core.batch_runner import BatchRunner
from serve_app.engine.costs.clocks import Clocks
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.costs.profiler import some_token
from serve_app.engine.guests import rest_trials
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import continuation, endless, options, request, running, start, until

GOOD = Profile({1: 0.01, 2: 0.012, 4: 0.016}, {8: 0.02, 16: 0.04, 32: 0.08}, {2: 0.012, 4: 0.016})
BESIDE_LOAD = Profile(
    {1: 0.03, 2: 0.02, 4: 0.05}, {8: 0.05, 16: 0.04, 32: 0.3}, {2: 0.03, 4: 0.02}, share=0.4
)
OPTIONS = options(4, n_ctx_slot=64)


class Kept(FakeBackend):
    """Tells other programs by its CPU time, and what it is to keep."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(endless, n_slots=4)
        self.profile, self.spins, self.kept = profile, True, list[Profile]()

    def keep(self, profile: Profile) -> None:
        self.kept.append(profile)


@pytest.fixture(autouse=True)
def share(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The share of the threads' time. Each batch takes what a good profile says."""
    shares = [1.0]

    def end(_clocks: Clocks, n_rows: int) -> tuple[float, float]:
        decodes = len({row[2] for row in backends[-1].batches[-1]}) == n_rows
        verifies = sum(row[3] for row in backends[-1].batches[-1]) == n_rows
        times = GOOD.decode_s if decodes else GOOD.verify_s if verifies else GOOD.prefill_s
        seconds = times.get(n_rows) or 0.0025 * n_rows
        return seconds / shares[0] ** 2, shares[0]

    monkeypatch.setattr(Clocks, "end", end)
    # Requests' batches take the double as long as the machine likes: nothing is learned of them.
    monkeypatch.setattr(BatchRunner, "learn", lambda *_: None)
    monkeypatch.setattr(loop, "_REST_S", 0.0)
    monkeypatch.setattr(rest_trials, "_PAUSE_S", 60.0)
    backends.clear()
    return shares


backends: list[Kept] = []


def backend_with(profile: Profile) -> Kept:
    backends.append(Kept(profile))
    return backends[-1]


def assert_good(profile: Profile) -> None:
    assert profile.decode_s == pytest.approx(GOOD.decode_s, rel=0.1)
    assert profile.prefill_s == pytest.approx(GOOD.prefill_s, rel=0.1)
    assert profile.verify_s == pytest.approx(GOOD.verify_s, rel=0.1)
    assert profile.share == 1.0


def test_a_profile_that_was_made_beside_a_load_heals_at_rest_and_is_kept() -> None:
    backend = backend_with(BESIDE_LOAD)
    with running(backend, OPTIONS):
        until(lambda: bool(backend.kept))
        n_trials = len(backend.batches)
        assert backend.slots == [[]] * 4, "nothing of a trial is left"
    assert_good(backend.kept[0])
    assert len(backend.kept) == 1
    assert len(backend.batches) == n_trials <= 16


def test_a_good_profile_needs_no_trial() -> None:
    backend = backend_with(GOOD)
    with running(backend, OPTIONS) as engine:
        (inbox,) = start(engine, request("a", "abc"))
        inbox.wait()
    assert {len(rows) for rows in backend.batches} <= {1, 3}


def test_trials_pause_beside_other_programs(share: list[float]) -> None:
    share[0] = 0.5
    backend = backend_with(BESIDE_LOAD)
    with running(backend, OPTIONS) as engine:
        until(lambda: bool(backend.batches))
        (inbox,) = start(engine, request("a", "abc"))
        inbox.wait()
        assert [len(rows) for rows in backend.batches if rows[0][0] == some_token(0)] == [1]
    assert not backend.kept


def test_what_was_learned_before_other_programs_came_is_kept(share: list[float]) -> None:
    backend = backend_with(BESIDE_LOAD)
    decode = backend.decode

    def decoding(rows: Sequence[Row]) -> None:
        share[0] = 1.0 if len(backend.batches) < 4 else 0.5
        decode(rows)

    backend.decode = decoding  # type: ignore[method-assign]
    with running(backend, OPTIONS):
        until(lambda: bool(backend.kept))
    (kept,) = backend.kept
    assert BESIDE_LOAD.share < kept.share < 1
    assert kept.decode_s[1] == pytest.approx(GOOD.decode_s[1], rel=0.1)


def test_who_comes_does_not_wait_for_a_trial() -> None:
    backend = backend_with(BESIDE_LOAD)
    backend.hold()
    with running(backend, replace(OPTIONS, max_stall_ms=math.inf)) as engine:
        until(lambda: backend.n_waiting == 1)  # a trial that would never end
        (inbox,) = start(engine, request("a", "abc", max_tokens=3))
        until(lambda: bool(backend.batches))  # it was cancelled
        assert not inbox.deltas
        backend.resume()
        assert inbox.wait().reason == FinishReason.LENGTH
        assert inbox.token_ids == continuation(b"abc", 3)
        until(lambda: bool(backend.kept))
    assert_good(backend.kept[0])


def test_behind_what_slots_keep() -> None:
    """What is cached stays, and trials go where slots have room."""
    backend = backend_with(BESIDE_LOAD)
    with running(backend, OPTIONS) as engine:
        for name in ("a", "b"):
            (inbox,) = start(engine, request(name, name * 50, max_tokens=3))
            inbox.wait()
        until(lambda: bool(backend.kept))
        (again,) = start(engine, request("c", "a" * 50 + "b"))
        assert again.wait().usage.cached_tokens == 50
        assert again.token_ids == continuation(b"a" * 50 + b"b", 4)


def test_a_full_cache_ends_trials_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_trials, "_LONGEST_PAUSE_S", 0.0)
    backend = backend_with(BESIDE_LOAD)
    decode, refused = backend.decode, iter([False, True, True, True])

    def refusing(rows: Sequence[Row]) -> None:
        if next(refused, False):
            raise CacheFullError("scripted cache is full")
        decode(rows)

    monkeypatch.setattr(backend, "decode", refusing)
    with running(backend, OPTIONS):
        until(lambda: bool(backend.kept))
    assert next(refused, None) is None
    assert_good(backend.kept[0])
