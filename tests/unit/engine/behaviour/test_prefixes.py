"""What need not be computed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

from serve_app.base.formats import Row
from serve_app.engine import ConfigError, DecodeError
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.engine import make_guests
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    PATIENCE_S,
    SteppedBackend,
    WatchedBackend,
    ask,
    assert_only_own_tokens_were_fed,
    continuation,
    endless,
    options,
    request,
    running,
    start,
    start_together,
)


@pytest.mark.parametrize(
    ("first", "second", "n_cached"),
    [
        pytest.param("abcd", "abcdefg", 4, id="longer"),
        pytest.param("abcd", "abcd", 3, id="same: the last token again"),
        pytest.param("abcd", "abc", 2, id="shorter: its last token again"),
        pytest.param("abcd", "abxy", 2, id="branch"),
        pytest.param("abcd", "xyz", 0, id="stranger"),
        pytest.param("a", "a", 0, id="one token is always decoded"),
    ],
)
def test_slot_keeps_a_prefix(first: str, second: str, n_cached: int) -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        ask(engine, request("a", first, max_tokens=1))
        inbox = ask(engine, request("b", second, max_tokens=3))
        assert engine.stats().tokens.cached_tokens == n_cached
    assert inbox.end.usage.cached_tokens == n_cached
    assert inbox.token_ids == continuation(second.encode(), 3)
    fed = backend.tenancies[1].fed
    assert [token for token, _ in fed][: len(second) - n_cached] == [*second[n_cached:].encode()]


def test_answer_is_part_of_the_next_prompts_prefix() -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        answer = ask(engine, request("a", "abcd", max_tokens=5)).text
        # The answer's last token was sampled but never fed.
        usage = ask(engine, request("b", f"abcd{answer}!")).end.usage
    assert usage.cached_tokens == 4 + 4


COMMON = "one and the same beginning, of no less than sixty letters: "


def fed_prompt_tokens(backend: WatchedBackend) -> int:
    """Prompt tokens that were computed."""
    return sum(
        sum(position < len(tenancy.prompt) for _, position in tenancy.fed)
        for tenancy in backend.tenancies
    )


def test_prefix_of_a_running_sequence_is_copied() -> None:
    backend = SteppedBackend(n_slots=2)
    with running(backend, options(2, n_batch=64, n_ctx_slot=99)) as engine:
        (first,) = start(engine, request("a", COMMON + "a"))
        backend.wait_for_batch()
        backend.step()
        (second,) = start(engine, request("b", COMMON + "b"))
        backend.resume()
        assert second.wait().usage.cached_tokens == len(COMMON)
        first.wait()
    assert first.token_ids == continuation((COMMON + "a").encode(), 4)
    assert second.token_ids == continuation((COMMON + "b").encode(), 4)
    assert_only_own_tokens_were_fed(backend)


def test_prefix_that_many_bring_at_once_is_computed_once() -> None:
    backend = WatchedBackend(n_slots=4)
    loop = DecoderLoop(lambda: backend, options(4, n_batch=20, n_ctx_slot=99), make_guests)
    requests = [request(name, COMMON + name) for name in "abcd"]
    inboxes = start_together(loop, *requests)
    loop.close(PATIENCE_S)
    for one, inbox in zip(requests, inboxes, strict=True):
        assert inbox.token_ids == continuation(one.prompt, 4)
    assert fed_prompt_tokens(backend) == len(COMMON) + 4
    assert sorted(inbox.end.usage.cached_tokens for inbox in inboxes) == [0, *[len(COMMON)] * 3]
    assert_only_own_tokens_were_fed(backend)


@pytest.mark.parametrize("cache_ram_bytes", [0, 100_000])
def test_slots_for_those_who_wait_are_emptied_at_once(cache_ram_bytes: int) -> None:
    """In a unified cache, the prefix would be computed with all that is there."""

    class Counting(FakeBackend):
        in_use: ClassVar[list[int]] = []

        def decode(self, rows: Sequence[Row]) -> None:
            self.in_use.append(sum(map(len, self.slots)))
            super().decode(rows)

    backend = Counting(endless, n_slots=4, n_cells=999)
    sizes = options(4, n_batch=20, n_ctx_slot=99, cache_ram_bytes=cache_ram_bytes)
    loop = DecoderLoop(lambda: backend, sizes, make_guests)
    for inbox in start_together(loop, *(request(name, name * 40) for name in "wxyz")):
        inbox.wait()
    assert min(map(len, backend.slots)) >= 40
    backend.in_use.clear()
    inboxes = start_together(loop, *(request(name, COMMON + name) for name in "abc"))
    loop.close(PATIENCE_S)
    assert backend.in_use[0] == 43  # what nobody needs a slot for
    assert [inbox.end.usage.cached_tokens for inbox in inboxes].count(len(COMMON)) == 2
    assert loop.stats().cache.stored_prefixes == (3 if cache_ram_bytes else 0)


def test_who_waits_for_a_prefix_lets_others_pass_and_survives_its_abort() -> None:
    backend = SteppedBackend(n_slots=3)
    with running(backend, options(3, n_batch=8, n_ctx_slot=99)) as engine:
        (first,) = start(engine, request("a", COMMON + "a"))
        backend.wait_for_batch()
        second, other = start(engine, request("b", COMMON + "b"), request("c", "xyz"))
        backend.step()
        backend.step()
        assert (engine.stats().queue.running, engine.stats().queue.waiting) == (2, 1)
        engine.abort("a")
        backend.resume()
        first.wait()
        n_fed_of_first = len(backend.tenancies[0].fed)
        assert 0 < second.wait().usage.cached_tokens == n_fed_of_first < len(COMMON)
        other.wait()
    assert second.token_ids == continuation((COMMON + "b").encode(), 4)
    assert other.token_ids == continuation(b"xyz", 4)
    assert_only_own_tokens_were_fed(backend)


def test_conversation_in_an_idle_slot_is_copied_not_overwritten() -> None:
    backend = WatchedBackend(n_slots=2)
    with running(backend, options(2, n_ctx_slot=200)) as engine:
        long_one = COMMON + "a conversation that has gone on for quite a while by now, and goes on"
        ask(engine, request("a", long_one))
        assert ask(engine, request("b", COMMON + "b")).end.usage.cached_tokens == len(COMMON)
        assert ask(engine, request("c", long_one + "!")).end.usage.cached_tokens == len(long_one)
    assert_only_own_tokens_were_fed(backend)


def test_aborted_prompt_leaves_what_was_fed() -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, n_batch=4)) as engine:
        (first,) = start(engine, request("a", "abcdefghij"))
        backend.wait_for_batch()
        backend.step()
        engine.abort("a")
        backend.resume()
        first.wait()
        assert ask(engine, request("b", "abcdefghij")).end.usage.cached_tokens == 4
    assert_only_own_tokens_were_fed(backend)


def test_memory_that_cannot_be_cut_is_computed_again() -> None:
    class Uncuttable(WatchedBackend):
        """As a model with recurrent layers: all or nothing."""

        def truncate(self, seq_id: int, n_past: int) -> None:
            if 0 < n_past < len(self.slots[seq_id]):
                raise DecodeError("cannot cut")
            super().truncate(seq_id, n_past)

    backend = Uncuttable(n_slots=1, fail_on=b"!")
    with running(backend) as engine:
        ask(engine, request("a", "abcd"))
        branch = ask(engine, request("b", "abxy"))
        assert branch.end.usage.cached_tokens == 0
        assert branch.token_ids == continuation(b"abxy", 4)
        assert isinstance(ask(engine, request("c", "!")).end.error, DecodeError)
        assert ask(engine, request("d", "abxy")).token_ids == branch.token_ids
        engine.check_health()


def test_a_pinned_prefix_is_never_forgotten() -> None:
    """Strangers take both slots again and again; the pinned slot behind them keeps it."""
    pinned = tuple(COMMON.encode())
    backend = FakeBackend(endless, n_slots=3)
    sizes = options(2, n_ctx_slot=256, pinned=(pinned,))
    with running(backend, sizes) as engine:
        assert backend.slots[2] == list(pinned)
        assert [slot.state for slot in engine.stats().slots] == ["idle", "idle", "pinned"]
        for name in "abc":
            for stranger in "12":
                ask(
                    engine,
                    request(stranger, f"{stranger}{name} knows nothing of this", max_tokens=2),
                )
            inbox = ask(engine, request(name, COMMON + name, max_tokens=3))
            assert inbox.end.usage.cached_tokens == len(COMMON)
            assert inbox.token_ids == continuation((COMMON + name).encode(), 3)
        assert backend.slots[2] == list(pinned)
        assert engine.stats().tokens.prompt_tokens == 6 * len("1a knows nothing of this") + 3


def test_a_pinned_slot_never_serves() -> None:
    pinned = tuple(COMMON.encode())
    backend = FakeBackend(endless, n_slots=2)
    with running(backend, options(1, n_ctx_slot=256, pinned=(pinned,))) as engine:
        inboxes = start(engine, *(request(name, f"{name} asks", max_tokens=4) for name in "abc"))
        for inbox in inboxes:
            inbox.wait()
    assert {row[2] for batch in backend.batches[4:] for row in batch} == {0}


@pytest.mark.parametrize("pinned", [((),), ((1,) * 64,)])
def test_pinned_prefixes_must_fit(pinned: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="system_prompts"):
        options(1, pinned=pinned)
