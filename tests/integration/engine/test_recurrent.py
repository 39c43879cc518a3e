"""Models with recurrent layers: a sequence keeps one state, and a few past ones to be rolled back to."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve_app.base.errors import DecodeError
from serve_app.base.formats import Row
from serve_app.base.sampling import LogitBias
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.backends import llama_cpp
from serve_app.engine.backends.llama_cpp import LlamaBackend
from tests.integration.models.forgetful_models import FORGETFUL, write_mamba

ROLLED_BACK = ("lfm2", "qwen35", "nemotron_h")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mamba model with random weights."""
    path = tmp_path_factory.mktemp("model") / "mamba.gguf"
    write_mamba(path)
    return path


async def answer(engine: Engine, prompt: tuple[int, ...], n_tokens: int = 12) -> tuple[int, ...]:
    two_tokens = LogitBias.of({30: 100.0, 31: 100.0} if n_tokens > 12 else {})
    sampling = SamplingParams(
        temperature=0, max_tokens=n_tokens, ignore_eos=True, logit_bias=two_tokens
    )
    request = GenerationRequest(f"{hash(prompt)}", prompt, sampling)
    return tuple([token async for delta in engine.submit(request) for token in delta.token_ids])


async def test_it_is_measured_and_answers(path: Path) -> None:
    """Alone, together, and a conversation's next turn: the same tokens as computed anew."""
    engine = Engine.load(
        path, EngineOptions(n_slots=2, n_ctx_slot=256, threads=1, n_batch=64, profile_limit_s=0.5)
    )
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
    options = EngineOptions(
        n_slots=2, n_ctx_slot=512, n_ctx=512, threads=1, n_batch=64, profile_limit_s=0
    )
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


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each kind whose layers llama.cpp rolls back."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ROLLED_BACK:
        FORGETFUL[kind](folder / f"{kind}.gguf")
    return {kind: folder / f"{kind}.gguf" for kind in ROLLED_BACK}


@pytest.fixture
def past_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots keep four past states of any kind of layers, for drafts from the text."""
    monkeypatch.setattr(
        llama_cpp, "_n_past_states", lambda _, options: 4 if options.speculate else 0
    )


@pytest.mark.usefixtures("past_states")
@pytest.mark.parametrize("kv_unified", [False, True], ids=["split", "unified"])
@pytest.mark.parametrize("kind", ROLLED_BACK)
async def test_drafts_from_the_text_change_no_answer(
    rolled_back: dict[str, Path], kind: str, kv_unified: bool
) -> None:
    """Right and wrong ones of several slots, whose answers are of two tokens only; then chats go on."""
    options = EngineOptions(
        n_slots=4,
        n_ctx_slot=512,
        threads=1,
        n_batch=64,
        flash_attn=False,
        kv_unified=kv_unified,
        max_stall_ms=math.inf,
        profile_limit_s=0.5,
    )
    prompts = [tuple(range(20, 110)), tuple(range(100, 127)), tuple(range(20, 70)), (*range(150),)]
    drafting = Engine.load(rolled_back[kind], options)
    plain = Engine.load(rolled_back[kind], replace(options, speculate=False))
    try:
        drafting.core.costs.verify_s = lambda *_: 1e-6  # type: ignore[method-assign]
        for engine in (drafting, plain):
            assert engine._backend.traits.n_rewind == (4 if engine is drafting else 0)
        together = await asyncio.gather(
            *(answer(drafting, prompt, 60 + 20 * i) for i, prompt in enumerate(prompts))
        )
        alone = [await answer(plain, prompt, 60 + 20 * i) for i, prompt in enumerate(prompts)]
        assert together == alone
        longer = [(*prompt, *said, 17) for prompt, said in zip(prompts, alone, strict=True)]
        again = await asyncio.gather(*(answer(drafting, prompt, 40) for prompt in longer))
        assert again == [await answer(plain, prompt, 40) for prompt in longer]
        stats = drafting.stats()
        assert 0 < stats.speculation.accepted_tokens < stats.speculation.drafted_tokens
        n_given = sum(map(len, [*prompts, *longer]))
        assert stats.tokens.prompt_tokens + stats.tokens.cached_tokens == n_given
    finally:
        drafting.close()
        plain.close()


@pytest.mark.usefixtures("past_states")
@pytest.mark.parametrize("kv_unified", [False, True], ids=["split", "unified"])
@pytest.mark.parametrize("kind", ROLLED_BACK)
def test_a_slot_is_rolled_back_behind_its_last_batch_only(
    rolled_back: dict[str, Path], kind: str, kv_unified: bool
) -> None:
    """A slot, and its copy, then go on like one that never had more tokens."""
    options = EngineOptions(
        n_slots=3, n_ctx_slot=64, threads=1, kv_unified=kv_unified, profile_limit_s=0
    )
    backend = LlamaBackend(rolled_back[kind], replace(options, flash_attn=False))

    def rows(slot_id: int, begin: int, end: int) -> list[Row]:
        return [(40 + i, i, slot_id, i == end - 1) for i in range(begin, end)]

    try:
        backend.decode(rows(2, 0, 7))
        backend.decode(rows(0, 0, 12))
        assert [n for n in range(1, 12) if backend.can_cut(0, n)] == [8, 9, 10, 11]
        assert not backend.can_cut(2, 6)
        with pytest.raises(DecodeError):
            backend.truncate(0, 7)
        backend.truncate(0, 9)
        assert not backend.can_cut(0, 8)
        backend.copy(0, 1)
        logits = []
        for slot_id in (1, 0, 2):
            backend.decode(rows(slot_id, 7 if slot_id == 2 else 9, 10))
            logits.append(backend._context.logits(0 if slot_id < 2 else 2).copy())
        np.testing.assert_allclose(logits[0], logits[2], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(logits[1], logits[2], rtol=1e-4, atol=1e-4)
        backend.decode([*rows(0, 10, 13), *rows(1, 10, 12)])  # which llama.cpp cuts into pieces
        assert [backend.can_cut(0, 12), backend.can_cut(1, 11)] == [False, False]
    finally:
        backend.close()
