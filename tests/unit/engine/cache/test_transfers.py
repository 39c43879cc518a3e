"""Which prefixes are worth a transfer, and what engines send each other."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from serve_app.base.errors import EngineClosedError
from serve_app.base.formats import State
from serve_app.base.values.adapters import SHARED_GROUP
from serve_app.engine import DecodeError, Engine
from serve_app.engine.cache.packing import pack, token_array
from serve_app.engine.cache.prefixes import Prefix
from serve_app.engine.cache.transfers import (
    MAX_PREFIXES,
    HotPrefix,
    Payload,
    RefusedPrefixError,
    begun_with,
    hottest,
)
from serve_app.engine.costs.copy_budget import CopySpeed
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

SYSTEM = [1] * 40
"""Tokens that many prompts begin with."""


def prompt(*parts: int) -> bytes:
    """`SYSTEM`, and 40 tokens for each part."""
    return pack([*SYSTEM, *(token for part in parts for token in [part] * 40)])


def ours(tokens: bytes) -> Prefix:
    return Prefix("ours", tokens)


def begun(
    prompts: list[bytes], held: list[bytes] | None = None, least: int = 2
) -> dict[bytes, tuple[int, int]]:
    """What is found, with a state of a byte for each of the holder's bytes."""
    holders = [(one, len(one)) for one in (prompts if held is None else held)]
    found = begun_with(map(ours, prompts), [(ours(one), size) for one, size in holders], least)
    assert {one.prefix.group for one in found} <= {"ours"}
    assert len({one.prefix for one in found}) == len(found)
    return {one.prefix.tokens: (one.n_begun, one.n_bytes) for one in found}


def test_packing() -> None:
    assert list(token_array(pack([0, 7, 2**31 - 1]))) == [0, 7, 2**31 - 1]


def test_what_prompts_have_in_common_counts_once() -> None:
    prompts = [prompt(2), prompt(3), prompt(4), prompt(5, 6), prompt(5, 7)]
    assert begun(prompts) == {prompt(): (5, len(prompt(2))), prompt(5): (2, len(prompt(5, 6)))}


def test_a_prompt_that_came_once_counts_for_who_leaves() -> None:
    assert begun([prompt(2), prompt(3)], least=1).keys() == {prompt(), prompt(2), prompt(3)}


def test_the_same_prompt_twice_is_shared() -> None:
    assert begun([prompt(2), prompt(2)]) == {prompt(2): (2, len(prompt(2)))}


def test_only_what_is_held_is_found() -> None:
    prompts = [prompt(2, 3), prompt(2, 3), prompt(2, 4)]
    assert begun(prompts, held=[]) == {}
    assert begun(prompts, held=[prompt(2), pack([9] * 80)]) == {prompt(2): (3, len(prompt(2)))}


def test_the_smallest_state_is_what_it_costs() -> None:
    held = [prompt(2, 3, 4), prompt(5), prompt(2, 3)]
    assert begun([prompt(2), prompt(2)], held) == {prompt(2): (2, len(prompt(2, 3)))}


def test_few_tokens_are_not_worth_it() -> None:
    assert begun([pack([1] * 31), pack([1] * 31)]) == {}
    # What 31 tokens share in bytes, but not in whole tokens, is nothing either.
    assert begun([pack([1] * 31 + [2]), pack([1] * 31 + [2 + 256])]) == {}


def test_cache_groups_have_nothing_in_common() -> None:
    mine, theirs = (Prefix(group, prompt(2)) for group in ("mine", "theirs"))
    assert begun_with([mine, theirs], [(mine, 10), (theirs, 10)], 2) == []
    assert begun_with([mine, mine, theirs], [(theirs, 10)], 2) == []
    assert begun_with([mine, mine, theirs], [(theirs, 10), (mine, 20)], 2) == [
        HotPrefix(mine, 2, 20)
    ]


def test_what_another_cache_group_holds_is_taken_and_what_is_pinned_is_not() -> None:
    mine = HotPrefix(Prefix("mine", prompt()), 2, 10)
    assert hottest([mine], [Prefix("theirs", prompt(2))], 100) == [mine]
    assert hottest([mine], [Prefix(SHARED_GROUP, prompt(2))], 100) == []
    theirs = HotPrefix(Prefix("theirs", prompt(2)), 3, 10)
    assert hottest([mine, theirs], [], 100) == [theirs, mine]


@pytest.mark.parametrize(
    ("held", "found"),
    [
        (Prefix("mine", prompt(2)), True),
        (Prefix("mine", pack([9])), False),
        (Prefix("theirs", prompt(2)), False),
        (Prefix("", prompt(2)), False),
        (Prefix(SHARED_GROUP, prompt(2)), True),
    ],
)
def test_who_finds_a_prefix(held: Prefix, found: bool) -> None:
    assert held.serves(Prefix("mine", prompt())) is found


def hot(tokens: bytes, n_begun: int, n_bytes: int = 10) -> HotPrefix:
    return HotPrefix(ours(tokens), n_begun, n_bytes)


def taken_of(offered: list[HotPrefix], held: list[bytes], budget: int) -> list[bytes]:
    return [one.prefix.tokens for one in hottest(offered, list(map(ours, held)), budget)]


@pytest.mark.parametrize(
    ("offered", "budget", "taken"),
    [
        ([hot(prompt(2), 3), hot(prompt(3), 5)], 100, [prompt(3), prompt(2)]),
        ([hot(prompt(2), 3), hot(prompt(3), 5)], 10, [prompt(3)]),
        ([hot(prompt(2), 3), hot(prompt(3), 5, 50)], 50, [prompt(2)]),  # by bytes, 3 is worth less
        ([hot(prompt(2), 3)], 9, []),
        ([], 100, []),
    ],
)
def test_the_budget_goes_to_what_saves_most(
    offered: list[HotPrefix], budget: int, taken: list[bytes]
) -> None:
    assert taken_of(offered, [], budget) == taken


def test_what_a_longer_one_has_is_not_taken_twice() -> None:
    offered = [hot(prompt(), 9), hot(prompt(2), 4)]
    assert taken_of(offered, [], 100) == [prompt(2)]
    assert taken_of(offered, [], 15) == [prompt()]  # no room for both
    near = [hot(pack([*SYSTEM, *range(10)]), 1), hot(pack([*SYSTEM, *range(20, 30)]), 1)]
    assert len(hottest(near, [], 100)) == 1


def test_what_is_held_already_is_not_taken() -> None:
    offered = [hot(prompt(), 9), hot(prompt(2), 4)]
    assert taken_of(offered, [prompt(3)], 100) == [prompt(2)]
    assert taken_of(offered, [prompt(2, 3)], 100) == []


def test_there_is_a_bound_on_their_number() -> None:
    offered = [hot(prompt(n), 1) for n in range(2, 100)]
    assert len(hottest(offered, [], 10_000)) == MAX_PREFIXES


SHARED = "what all requests of this application begin with. "
OPTIONS = options(2, n_ctx_slot=256, cache_ram_bytes=10_000)


def prefix(text: str, group: str = "") -> Prefix:
    return Prefix(group, pack(list(text.encode())))


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
        odd = Payload(engine.prefixes.key, Prefix("", pack([7] * n_tokens)), np.zeros(4, np.uint8))
        with pytest.raises(RefusedPrefixError, match="tokens"):
            engine.prefixes.import_prefix(odd, n_wanted)


@pytest.mark.parametrize("lengths", [(0,), (5, 5), (6, 4), (11,)])
def test_checkpoints_of_other_lengths_are_refused(lengths: tuple[int, ...]) -> None:
    with running(fake(), OPTIONS) as engine:
        state, prefix = np.zeros(4, np.uint8), Prefix("", pack([7] * 10))
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
