"""A model with recurrent layers: a sequence keeps one state, and cannot forget the last tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from tests.integration.models.forgetful_models import write_mamba


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mamba model with random weights."""
    path = tmp_path_factory.mktemp("model") / "mamba.gguf"
    write_mamba(path)
    return path


async def answer(engine: Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    request = GenerationRequest(f"{hash(prompt)}", prompt, sampling)
    return tuple([token async for delta in engine.submit(request) for token in delta.token_ids])


async def test_it_is_measured_and_answers(path: Path) -> None:
    """Alone, together, and a conversation's next turn: the same tokens as computed anew."""
    engine = Engine.load(path, EngineOptions(n_slots=2, n_ctx_slot=256, threads=1, n_batch=64))
    try:
        assert list(engine.stats().costs.step_time["decode_ms"]) == [1, 2]
        prompts = [tuple(range(20, 120)), tuple(range(200, 230))]
        alone = [await answer(engine, prompt) for prompt in prompts]
        assert all(len(tokens) == 12 for tokens in alone)
        longer = [(*prompt, *tokens, 300) for prompt, tokens in zip(prompts, alone, strict=True)]
        together = await asyncio.gather(*(answer(engine, prompt) for prompt in longer))
    finally:
        engine.close()
    fresh = Engine.load(
        path, EngineOptions(n_slots=1, n_ctx_slot=256, threads=1, profile_limit_s=0)
    )
    try:
        assert [await answer(fresh, prompt) for prompt in prompts] == alone
        assert [await answer(fresh, prompt) for prompt in longer] == together
    finally:
        fresh.close()


async def test_a_request_longer_than_a_share_beside_a_short_one(path: Path) -> None:
    """Such a model's cache cannot change, so it is unified from the start."""
    options = EngineOptions(n_slots=2, n_ctx_slot=512, n_ctx=512, threads=1, n_batch=64)
    prompts = [tuple(20 + i % 200 for i in range(300)), tuple(range(200, 230))]
    engine = Engine.load(path, options)
    try:
        assert engine.stats().compute.kv_unified
        together = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
    finally:
        engine.close()
    fresh = Engine.load(path, replace(options, n_slots=1, n_ctx=None, profile_limit_s=0))
    try:
        assert [await answer(fresh, prompt) for prompt in prompts] == together
    finally:
        fresh.close()
