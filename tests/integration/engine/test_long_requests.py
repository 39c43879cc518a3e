"""A request longer than a slot's share, with a real model: alone, beside others, and its next turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.engine import (
    Engine,
    EngineOptions,
    GenerationRequest,
    PromptTooLongError,
    SamplingParams,
    TokenDelta,
)
from tools.random_models.model import SHAPES, write_random_gguf

SHARED = EngineOptions(
    n_slots=4, n_ctx_slot=1024, n_ctx=1024, threads=1, n_batch=64, profile_limit_s=2.0,
    cache_ram_bytes=2**26, flash_attn=False,
)  # fmt: skip
"""Four slots, whose shares are 256 tokens."""
ALONE = replace(SHARED, n_slots=1, n_ctx=None, kv_unified=True, profile_limit_s=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


@pytest.fixture(scope="module", params=["split", "unified"])
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[Engine]:
    """The cache is to change for long requests, or is unified from the start."""
    kv_unified = True if request.param == "unified" else None
    engine = Engine.load(path, replace(SHARED, kv_unified=kv_unified))
    yield engine
    engine.close()


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, 500), k=n))


async def told(engine: Engine, tokens: tuple[int, ...], n: int = 4) -> TokenDelta:
    """All that the engine says after a prompt, as one delta."""
    sampling = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    stream = engine.submit(GenerationRequest(str(hash(tokens)), tokens, sampling))
    deltas = [delta async for delta in stream]
    whole = deltas[0]
    for delta in deltas[1:]:
        whole = whole.then(delta)
    return whole


async def expected(path: Path, *prompts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What an engine says that has one slot with all cells."""
    engine = Engine.load(path, ALONE)
    try:
        return [(await told(engine, one)).token_ids for one in prompts]
    finally:
        await asyncio.to_thread(engine.close)


async def test_a_long_prompt_beside_short_ones_and_its_next_turn(
    path: Path, engine: Engine
) -> None:
    prompts = [prompt(40, 1), prompt(700), prompt(50, 2)]
    answers = await asyncio.gather(*(told(engine, one) for one in prompts))
    assert [one.token_ids for one in answers] == await expected(path, *prompts)
    assert engine.stats().compute.kv_unified
    turn = prompts[1] + answers[1].token_ids + prompt(5, 3)
    end = (await told(engine, turn)).end
    assert end is not None
    assert end.usage.cached_tokens == 703


async def test_two_that_do_not_fit_together_take_turns(path: Path, engine: Engine) -> None:
    prompts = [prompt(600, 4), prompt(700, 5)]
    answers = await asyncio.gather(*(told(engine, one) for one in prompts))
    assert [one.token_ids for one in answers] == await expected(path, *prompts)


async def test_the_longest_prompt_leaves_one_token(engine: Engine) -> None:
    answer = await told(engine, prompt(1023, 6))
    assert len(answer.token_ids) == 1
    with pytest.raises(PromptTooLongError):
        await told(engine, prompt(1024, 6))


def test_attention_without_flash_computes_few_rows_at_once(path: Path) -> None:
    """Its buffers grow with rows and cells, so they are no larger than those of a split cache."""
    sizes = []
    unified = replace(SHARED, flash_attn=False, profile_limit_s=0.0, n_batch=512)
    for options in (unified, replace(unified, n_ctx=None, n_ctx_slot=256, kv_unified=False)):
        engine = Engine.load(path, options)
        sizes.append(engine.stats().memory.compute_bytes)
        engine.close()
    assert 0 < sizes[0] <= 1.5 * sizes[1]


def test_neither_kind_takes_more_cells(path: Path) -> None:
    n_bytes = set()
    for kv_unified in (True, None):
        engine = Engine.load(path, replace(SHARED, kv_unified=kv_unified))
        n_bytes.add(engine.stats().memory.cache_bytes)
        engine.close()
    assert len(n_bytes) == 1
