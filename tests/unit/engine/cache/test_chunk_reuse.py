"""Chunks of prompts that slots have behind tokens too many."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.cache.chunk_reuse import MAX_CUTS, plan
from serve_app.engine.cache.packing import common_prefix, pack
from tests.unit.engine.harness import (
    WatchedBackend,
    ask,
    assert_only_own_tokens_were_fed,
    options,
    request,
    running,
)

TOKENS = st.lists(st.integers(0, 3), max_size=24)


def reference(cached: list[int], prompt: list[int], n_least: int) -> int:
    """llama-server's own way, token by token: how many first tokens of the prompt there are then."""
    have = common_prefix(cached, prompt)
    at = have
    while at < len(cached) and have < len(prompt):
        n = common_prefix(cached[at:], prompt[have:])
        if n >= n_least:
            at, have = at + n, have + n
        else:
            at += 1
    return have


@given(TOKENS, TOKENS, st.integers(1, 4))
def test_it_is_what_llama_server_does(cached: list[int], prompt: list[int], n_least: int) -> None:
    n_shared = common_prefix(cached, prompt)
    found = plan(pack(cached), pack(prompt), n_shared, n_least)
    assert found.n_cached == reference(cached, prompt, n_least)
    for n_keep, n_discard in found.cuts:
        assert n_discard > 0
        del cached[n_keep : n_keep + n_discard]
    assert cached[: found.n_cached] == prompt[: found.n_cached]


def test_tokens_that_look_alike_between_others_are_none() -> None:
    cached, prompt = [1, 256, 65536, 1], [65536, 256]
    assert plan(pack(cached), pack(prompt), 0, 1).n_cached == 1
    assert plan(pack([1 << 8]), pack([1]), 0, 1).n_cached == 0


def test_there_are_not_too_many_cuts() -> None:
    prompt = list(range(1000))
    cached = [token for one in prompt for token in (5000, one)]
    found = plan(pack(cached), pack(prompt), 0, 1)
    assert len(found.cuts) == found.n_cached == MAX_CUTS


BEGUN, GONE, REST = "Once upon. ", "Gone now. ", "The rest of it all."


def test_a_prompt_without_a_part_of_the_one_before() -> None:
    backend = WatchedBackend(n_slots=2)
    with running(backend, options(2)) as engine:
        ask(engine, request("a", BEGUN + GONE + REST))
        asked = replace(request("b", BEGUN + REST), n_cache_reuse=4, slot_id=0)
        end = ask(engine, asked).end
    assert (end.slot_id, end.usage.cached_tokens) == (0, len(BEGUN + REST) - 1)


def test_the_slot_with_most_of_it_is_found() -> None:
    backend = WatchedBackend(n_slots=3)
    with running(backend, options(3)) as engine:
        ask(engine, replace(request("x", "something else"), slot_id=0))
        ask(engine, replace(request("a", GONE + BEGUN + REST), slot_id=1))
        end = ask(engine, replace(request("b", BEGUN + REST), n_cache_reuse=4)).end
        other = replace(request("c", BEGUN + REST, group="other"), n_cache_reuse=4)
        assert ask(engine, other).end.usage.cached_tokens == 0
    assert (end.slot_id, end.usage.cached_tokens) == (1, len(BEGUN + REST) - 1)


def test_others_start_from_what_was_not_moved() -> None:
    backend = WatchedBackend(n_slots=2)
    with running(backend, options(2)) as engine:
        ask(engine, replace(request("a", BEGUN + GONE + REST), slot_id=0))
        moved = replace(request("b", BEGUN + REST), n_cache_reuse=4, slot_id=0)
        assert ask(engine, moved).end.usage.cached_tokens == len(BEGUN + REST) - 1
        after = ask(engine, request("c", BEGUN + REST)).end
    assert after.usage.cached_tokens == len(BEGUN)
    assert_only_own_tokens_were_fed(backend)
