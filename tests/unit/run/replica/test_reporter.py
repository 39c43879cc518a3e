"""What routers learn of an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from serve_app.base.values.adapters import SHARED_GROUP, AdapterUse
from serve_app.channel.blocks import Inventory, chain, request_key, turn_key
from serve_app.channel.score import Report
from serve_app.engine import CachedPrefixes, EngineStats, SlotStats
from serve_app.engine.metrics.stats import CachedPrompt
from serve_app.run.replica.reporting import pressure, report_of
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import ask, endless, options, request, running, start, until
from tests.unit.engine_stats import changed_stats

LONG = "once upon a time there was a fox that" + "!" * 60 + "\n"


def stats_with(**changed: Any) -> EngineStats:
    """An engine's statistics, but for these."""
    with running(FakeBackend(endless, n_slots=1)) as engine:
        return changed_stats(engine.stats(), **changed)


def blocks_of(cached_prefixes: CachedPrefixes) -> set[int]:
    return set(report_of(stats_with(), cached_prefixes, Inventory()).blocks)


def test_an_engine_holds_prompts_that_wait_run_and_have_ended() -> None:
    texts = [LONG + letter * 32 for letter in "abcd"]
    backend = FakeBackend(endless, n_slots=2)
    with running(backend, replace(options(2), n_ctx_slot=256)) as engine:
        ask(engine, request("ended", texts[0]))
        backend.hold()
        start(engine, *(request(f"{i}", text) for i, text in enumerate(texts[1:])))
        until(lambda: engine.cached_prefixes().taken == ("ended", "0", "1", "2"))
        held = blocks_of(engine.cached_prefixes())
        for text in texts[1:]:
            assert set(chain(list(text.encode()), "")) <= held


def test_what_lost_its_slot_is_held_while_it_is_stored() -> None:
    backend = FakeBackend(endless, n_slots=1)
    with running(backend, replace(options(1), n_ctx_slot=256, cache_ram_bytes=9999)) as engine:
        ask(engine, request("a", "a" * 64))
        ask(engine, request("b", "b" * 64))
        assert {*chain(b"a" * 64, ""), *chain(b"b" * 64, "")} <= blocks_of(engine.cached_prefixes())


def test_what_is_pinned_is_held_from_the_start() -> None:
    pinned = tuple(b"be brief" * 8)
    backend = FakeBackend(endless, n_slots=3)
    with running(backend, replace(options(2), n_ctx_slot=256, pinned=(pinned,))) as engine:
        assert set(chain(pinned)) <= blocks_of(engine.cached_prefixes())


def test_what_a_cache_group_began_is_held_for_it_only() -> None:
    backend = FakeBackend(endless, n_slots=1)
    with running(backend, replace(options(1), n_ctx_slot=256, cache_ram_bytes=9999)) as engine:
        ask(engine, request("stored", "a" * 64, group="mine"))
        ask(engine, request("in a slot", "b" * 64, group="mine"))
        backend.hold()
        start(engine, *(request(f"{i}", "c" * 64, group="mine") for i in range(2)))
        until(lambda: len(engine.cached_prefixes().taken) == 4)
        held = blocks_of(engine.cached_prefixes())
    for letter in b"abc":
        tokens = bytes([letter]) * 64
        assert set(chain(tokens, "mine")) <= held
        for group in ("theirs", "", SHARED_GROUP):
            assert not set(chain(tokens, group)) & held


def test_a_report_says_how_fast_and_how_busy() -> None:
    stats = stats_with(
        n_slots=4,
        running=3,
        waiting=2,
        backlog_s=7.5,
        prefill_backlog_s=1.5,
        first_end_s=0.5,
        prompt_token_s=0.002,
        token_s=0.005,
        answer_tokens=40.0,
    )
    prefixes = CachedPrefixes((CachedPrompt("mine", tuple(range(64))),), ("x",))
    said = report_of(stats, prefixes, Inventory())
    held, taken = frozenset(chain(range(64), "mine")), frozenset([request_key("x")])
    assert said == Report(*(4, 5, 7.5, 1.5, 0.002, 0.005, 40.0, held, taken), first_end_s=0.5)


def test_adapters_are_told_as_long_as_requests_have_them() -> None:
    backend = FakeBackend(endless, n_slots=1)
    backend.adapters.loaded_keys = {"legal"}
    asked = replace(request("a", "prompt"), adapters=(AdapterUse("legal", 1.0),))
    with running(backend, options(1)) as engine:
        backend.hold()
        (inbox,) = start(engine, asked)
        until(lambda: engine.cached_prefixes().taken == ("a",))
        said = report_of(engine.stats(), engine.cached_prefixes(), Inventory())
        assert said.turns == {turn_key("\0legal=1.0")}
        backend.resume()
        inbox.wait()
        until(lambda: not engine.cached_prefixes().adapters)


def test_an_engine_that_rests_has_nothing_new_to_say() -> None:
    stats, prefixes, inventory = stats_with(), CachedPrefixes((), ("x",)), Inventory()
    first = report_of(stats, prefixes, inventory)
    assert first == report_of(stats, prefixes, inventory)
    assert first != report_of(changed_stats(stats, running=1), prefixes, inventory)
    assert first != report_of(stats, CachedPrefixes(), inventory)


def test_pressure_counts_only_the_cells_of_running_requests() -> None:
    slots = (SlotStats(0, "decode", "a", 30, 20, 10), SlotStats(1, "idle", None, 60, 0, 0))
    stats = stats_with(
        n_slots=2, n_ctx_slot=64, n_ctx=32, running=1, waiting=0, backlog_s=0.0, slots=slots
    )
    assert pressure(stats) == {"pressure": 30 / 32 / 0.9}
    assert pressure(replace(stats, n_ctx=128)) == {"pressure": 1 / 2 / 0.8}


def test_what_is_in_the_background_makes_pressure_only_where_it_may_scale() -> None:
    slots = (SlotStats(0, "decode", "a", 32, 20, 10, background=True),)
    stats = stats_with(
        n_slots=2,
        n_ctx_slot=64,
        n_ctx=128,
        slots=slots,
        backlog_s=0.0,
        running=0,
        waiting=0,
        background_running=1,
        background_waiting=7,
        background_backlog_s=60.0,
    )
    assert pressure(stats) == {"pressure": 0.0}
    assert pressure(stats, with_background=True) == {"pressure": 60 / 10}
