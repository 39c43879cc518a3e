"""A model with recurrent layers: a sequence keeps one state, and cannot forget the last tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from serve_app.demo_model.gguf_file import add_tokenizer
from serve_app.demo_model.random_gguf import SHAPES, vocabulary
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from tests.integration.models.embedding_models import finish

N_EMBD, N_STATE, N_CONV, N_RANK, N_LAYER = 64, 16, 4, 4, 2
N_INNER = 2 * N_EMBD  # as llama.cpp wants it


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mamba model with random weights."""
    path = tmp_path_factory.mktemp("model") / "mamba.gguf"
    tokens, merges = vocabulary(SHAPES["tiny"].n_vocab)
    writer = GGUFWriter(path, "mamba")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(1024)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(N_CONV)
    writer.add_ssm_inner_size(N_INNER)
    writer.add_ssm_state_size(N_STATE)
    writer.add_ssm_time_step_rank(N_RANK)
    add_tokenizer(writer, tokens, merges)
    rng = np.random.default_rng(0)
    tensors: dict[str, NDArray[np.float32]] = {}

    def add(name: str, *shape: int, std: float = 0.2, mean: float = 0.0) -> None:
        tensors[name] = rng.normal(mean, std, shape).astype(np.float32)

    add("token_embd.weight", len(tokens), N_EMBD)
    add("output_norm.weight", N_EMBD, mean=1.0, std=0.0)
    for layer in (f"blk.{i}." for i in range(N_LAYER)):
        add(layer + "attn_norm.weight", N_EMBD, mean=1.0, std=0.0)
        add(layer + "ssm_in.weight", 2 * N_INNER, N_EMBD)
        add(layer + "ssm_conv1d.weight", N_INNER, N_CONV)
        add(layer + "ssm_conv1d.bias", N_INNER)
        add(layer + "ssm_x.weight", N_RANK + 2 * N_STATE, N_INNER)
        add(layer + "ssm_dt.weight", N_INNER, N_RANK)
        add(layer + "ssm_dt.bias", N_INNER)
        add(layer + "ssm_a", N_INNER, N_STATE, mean=-1.0)
        add(layer + "ssm_d", N_INNER)
        add(layer + "ssm_out.weight", N_EMBD, N_INNER)
    finish(writer, tensors)
    return path


async def answer(engine: Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    request = GenerationRequest(f"{hash(prompt)}", prompt, sampling)
    return tuple([token async for delta in engine.submit(request) for token in delta.token_ids])


async def test_it_is_measured_and_answers(path: Path) -> None:
    """Alone, together, and a conversation's next turn: the same tokens as computed anew."""
    engine = Engine.load(path, EngineOptions(n_slots=2, n_ctx_slot=256, threads=1, n_batch=64))
    try:
        assert list(engine.stats().step_time["decode_ms"]) == [1, 2]
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
