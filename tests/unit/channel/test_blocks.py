"""Prompts as chains of hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.channel.blocks import BLOCK_TOKENS, MAX_BLOCKS, Inventory, chain, n_leading


@given(st.lists(st.integers(-(2**31), 2**31 - 2), max_size=200), st.integers(0, 199))
def test_chains_differ_from_the_first_different_block_on(tokens: list[int], place: int) -> None:
    place = min(place, len(tokens))
    other = tokens[:place] + [token + 1 for token in tokens[place:]]
    n_same = place // BLOCK_TOKENS
    assert len(chain(tokens)) == len(tokens) // BLOCK_TOKENS
    assert chain(tokens)[:n_same] == chain(other)[:n_same]
    assert not set(chain(tokens)[n_same:]) & set(chain(other)[n_same:])


def test_a_block_elsewhere_is_another() -> None:
    assert len(set(chain([7] * 10 * BLOCK_TOKENS))) == 10


def test_a_chain_is_the_same_everywhere() -> None:
    assert chain(range(64)) == (2342333368, 4288378450)


def test_cache_groups_have_no_block_in_common() -> None:
    tokens = range(64)
    chains = [chain(tokens, group) for group in ("", "mine", "theirs")] + [chain(tokens)]
    assert len({block for one in chains for block in one}) == 8
    assert chain(tokens, "mine") == (2879001194, 2168492156)


@pytest.mark.parametrize("n", range(6))
def test_leading_blocks_are_counted(n: int) -> None:
    wanted = chain(range(5 * BLOCK_TOKENS))
    assert n_leading(wanted, set(wanted[:n])) == min(n, 5)


def test_an_inventory_has_every_block_once() -> None:
    shared = list(range(64))
    prompts = [shared + [1] * 32, shared + [2] * 32]
    blocks = Inventory().blocks([("", one) for one in prompts])
    assert len(blocks) == len(set(blocks)) == 4
    assert set(blocks) == {*chain(prompts[0], ""), *chain(prompts[1], "")}


def test_an_inventory_that_is_full_keeps_beginnings() -> None:
    first, second = range(BLOCK_TOKENS * (MAX_BLOCKS - 2)), range(1, 1 + BLOCK_TOKENS * 8)
    blocks = Inventory().blocks([("", first), ("", second), ("", range(9, 999))])
    assert len(blocks) == MAX_BLOCKS
    assert blocks[-2:] == list(chain(second, "")[:2])


def test_an_inventory_tells_cache_groups_apart() -> None:
    inventory, tokens = Inventory(), tuple(range(64))
    assert inventory.blocks([("mine", tokens)]) == list(chain(tokens, "mine"))
    assert inventory.blocks([("theirs", tokens)]) == list(chain(tokens, "theirs"))


def test_an_inventory_follows_what_changes() -> None:
    inventory = Inventory()
    for start in range(3):
        prompt = list(range(start, start + 64))
        assert inventory.blocks([("", prompt)]) == list(chain(prompt, ""))
