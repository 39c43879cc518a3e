"""Prefixes from one engine to another, over the scripted backend."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from serve_app.engine import DecodeError, Engine
from serve_app.engine.autotune.copy_budget import CopySpeed
from serve_app.engine.backends.base import State
from serve_app.engine.kv_cache.packing import packed
from serve_app.engine.kv_cache.transfers import Payload, Prefix, RefusedPrefixError
from serve_app.errors import EngineClosedError
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    PATIENCE_S,
    SteppedBackend,
    ask,
    continuation,
    endless,
    options,
    request,
    running,
    start,
)

SHARED = "what all requests of this application begin with. "
OPTIONS = options(2, n_ctx_slot=256, cache_ram_bytes=10_000)


def prefix(text: str, group: str = "") -> Prefix:
    return Prefix(group, packed(list(text.encode())))


def fake(n_slots: int = 2) -> FakeBackend:
    return FakeBackend(endless, n_slots=n_slots)


def told(engine: Engine, text: str, group: str = "") -> int:
    """Run a prompt; returns how many of its tokens were cached."""
    inbox = ask(engine, request(text, text, group=group))
    assert inbox.token_ids == continuation(text.encode(), 4)
    return inbox.end.usage.cached_tokens


def payload(engine: Engine, text: str = SHARED, group: str = "") -> Payload:
    """From one process to another."""
    exported = engine.prefixes.export_prefix(prefix(text, group))
    assert exported is not None
    moved: Payload = pickle.loads(pickle.dumps(exported, protocol=5))
    return moved


def test_a_fresh_engine_starts_from_what_another_one_computed() -> None:
    with running(fake(), OPTIONS) as source, running(fake(), OPTIONS) as fresh:
        for name in "AB":
            told(source, SHARED + name)
        (offered,) = source.prefixes.offers(2)
        assert (offered.prefix, offered.n_begun) == (prefix(SHARED), 2)
        sent = payload(source)
        assert fresh.prefixes.import_prefix(sent, len(SHARED)) == 4 * len(SHARED)
        assert told(fresh, SHARED + "C") == len(SHARED)
        given, got = source.stats(), fresh.stats()
    assert (given.cache.sent_prefixes, given.cache.sent_bytes) == (1, sent.state.size)
    assert (got.cache.received_prefixes, got.cache.received_bytes) == (1, 4 * len(SHARED))
    assert offered.n_bytes == sent.state.size
    assert got.tokens.restored_tokens == len(SHARED)


def test_what_is_taken_whole_keeps_its_end() -> None:
    with running(fake(), OPTIONS) as source, running(fake(), OPTIONS) as target:
        told(source, SHARED + "A")
        sent = payload(source)
        assert target.prefixes.import_prefix(sent, len(sent.prefix.tokens) // 4) == sent.state.size
        assert (
            told(target, SHARED + "A" + endless_text(SHARED + "A") + "!")
            == len(sent.prefix.tokens) // 4
        )


def endless_text(prompt: str) -> str:
    """What was answered to a prompt, as far as it was fed."""
    return bytes(continuation(prompt.encode(), 3)).decode()


def test_what_is_transferred_stays_in_its_cache_group() -> None:
    with running(fake(), OPTIONS) as source, running(fake(), OPTIONS) as fresh:
        for name in "AB":
            told(source, SHARED + name, "mine")
        (offered,) = source.prefixes.offers(2)
        assert offered.prefix == prefix(SHARED, "mine")
        assert source.prefixes.lacks([prefix(SHARED, "mine"), prefix(SHARED)]) == [False, True]
        assert source.prefixes.export_prefix(prefix(SHARED, "theirs")) is None
        assert source.prefixes.export_prefix(prefix(SHARED)) is None
        sent = payload(source, group="mine")
        assert fresh.prefixes.import_prefix(sent, len(SHARED)) > 0
        assert told(fresh, SHARED + "C", "theirs") == 0
        assert told(fresh, SHARED + "D") == 0
        assert told(fresh, SHARED + "E", "mine") == len(SHARED)


def test_what_two_cache_groups_begin_with_is_not_what_several_prompts_share() -> None:
    with running(fake(), OPTIONS) as source:
        told(source, SHARED + "A", "mine")
        told(source, SHARED + "B", "theirs")
        assert source.prefixes.offers(2) == []
        told(source, SHARED + "C", "theirs")
        assert [(one.prefix.group, one.n_begun) for one in source.prefixes.offers(2)] == [
            ("theirs", 2)
        ]


def test_what_is_in_memory_is_exported_to_its_cache_group_only() -> None:
    with running(fake(1), replace(OPTIONS, n_slots=1)) as source:
        told(source, SHARED + "A", "mine")
        told(source, "something else that takes the slot, and is kept in memory", "theirs")
        assert source.stats().cache.stored_prefixes == 1
        assert source.prefixes.export_prefix(prefix(SHARED, "theirs")) is None
        assert payload(source, group="mine").prefix.group == "mine"


def test_offers_are_of_the_last_prompts_only() -> None:
    with running(fake(), OPTIONS) as source:
        for i in range(130):
            told(source, f"{i:03} is another prompt of at least thirty-two tokens")
        assert len(source.prefixes.offers(1)) > 2
        assert source.prefixes.offers(2) == []
        told(source, "129 is another prompt of at least thirty-two tokens")
        assert [one.n_begun for one in source.prefixes.offers(2)] == [2]


def test_what_it_lacks() -> None:
    with running(fake(), OPTIONS) as engine:
        told(engine, SHARED + "A")
        wanted = [prefix(SHARED), prefix(SHARED + "B"), prefix("else")]
        assert engine.prefixes.lacks(wanted) == [False, True, True]
        assert engine.prefixes.export_prefix(prefix("else")) is None


def test_a_small_store_does_not_take_what_does_not_fit() -> None:
    small = replace(OPTIONS, cache_ram_bytes=4 * len(SHARED) - 1)
    with running(fake(), OPTIONS) as source, running(fake(), small) as fresh:
        told(source, SHARED + "A")
        assert fresh.prefixes.import_prefix(payload(source), len(SHARED)) == 0
        assert fresh.stats().cache.received_prefixes == 0
        assert fresh.stats().cache.stored_prefixes == 0
        assert told(fresh, SHARED + "B") == 0


def test_what_is_there_already_is_not_taken_again() -> None:
    with running(fake(), OPTIONS) as source, running(fake(), OPTIONS) as fresh:
        told(source, SHARED + "A")
        sent = payload(source)
        assert fresh.prefixes.import_prefix(sent, len(SHARED)) > 0
        assert fresh.prefixes.import_prefix(sent, len(SHARED)) == 0


def test_another_models_prefix_is_refused() -> None:
    other = fake()
    other.state_key = b"another"
    with running(fake(), OPTIONS) as source, running(other, OPTIONS) as fresh:
        told(source, SHARED + "A")
        with pytest.raises(RefusedPrefixError, match="another model"):
            fresh.prefixes.import_prefix(payload(source), len(SHARED))
        assert told(fresh, SHARED + "B") == 0


@pytest.mark.parametrize(("n_tokens", "n_wanted"), [(0, 0), (256, 256), (10, 0), (10, 11)])
def test_a_prefix_of_the_wrong_length_is_refused(n_tokens: int, n_wanted: int) -> None:
    with running(fake(), OPTIONS) as engine:
        odd = Payload(
            engine.prefixes.key, Prefix("", packed([7] * n_tokens)), np.zeros(4, np.uint8)
        )
        with pytest.raises(RefusedPrefixError, match="tokens"):
            engine.prefixes.import_prefix(odd, n_wanted)


@pytest.mark.parametrize("lengths", [(0,), (5, 5), (6, 4), (11,)])
def test_checkpoints_of_other_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    with running(fake(), OPTIONS) as engine:
        state, prefix = np.zeros(4, np.uint8), Prefix("", packed([7] * 10))
        odd = Payload(engine.prefixes.key, prefix, state, tuple((n, state) for n in lengths))
        with pytest.raises(RefusedPrefixError, match="checkpoints"):
            engine.prefixes.import_prefix(odd, 10)


def test_a_state_that_the_backend_refuses_is_not_kept() -> None:
    class Suspicious(FakeBackend):
        def restore(self, seq_id: int, state: State) -> None:
            raise DecodeError("not mine")

    with running(fake(), OPTIONS) as source:
        told(source, SHARED + "A")
        sent = payload(source)
    with running(Suspicious(endless, n_slots=2), OPTIONS) as fresh:
        with pytest.raises(RefusedPrefixError, match="not mine"):
            fresh.prefixes.import_prefix(sent, len(SHARED))
        assert fresh.stats().cache.stored_prefixes == 0


def test_where_slots_cannot_be_cut_a_prefix_is_kept_whole() -> None:
    class Uncuttable(FakeBackend):
        def truncate(self, seq_id: int, n_past: int) -> None:
            if n_past:
                raise DecodeError("recurrent")
            super().truncate(seq_id, n_past)

    with running(fake(), OPTIONS) as source:
        told(source, SHARED + "A")
        sent = payload(source)
    with running(Uncuttable(endless, n_slots=2), OPTIONS) as fresh:
        assert fresh.prefixes.import_prefix(sent, len(SHARED)) == sent.state.size
        assert not any(slot.n_past for slot in fresh.stats().slots)


def test_nobody_waits_for_a_state_that_takes_long_to_save(
    after: Callable[[str], threading.Event],
) -> None:
    backend, asked = SteppedBackend(n_slots=2), after("run_between_steps")
    with (
        mock.patch.object(CopySpeed, "forecast_s", lambda speed, n_bytes: 1.0 * n_bytes),
        running(backend, replace(OPTIONS, n_batch=64)) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        (inbox,) = start(engine, request("runs", SHARED))
        backend.wait_for_batch()
        backend.step()  # the prompt is computed
        exported = pool.submit(engine.prefixes.export_prefix, prefix(SHARED))
        assert asked.wait(PATIENCE_S)
        backend.step()
        assert exported.result(PATIENCE_S) is None
        backend.resume()
        inbox.wait()
        assert engine.prefixes.export_prefix(prefix(SHARED)) is not None


def test_a_closed_engine_gives_nothing() -> None:
    with running(fake(), OPTIONS) as engine:
        pass
    with pytest.raises(EngineClosedError):
        engine.prefixes.export_prefix(prefix(SHARED))
