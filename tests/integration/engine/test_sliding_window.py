"""A model that attends to a window of its context: its saved states lack what is before the last window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from serve_app.engine import DecodeError, Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model
from tools.gguf_file import add_tokenizer
from tools.random_models.model import SHAPES, write_random_gguf

WINDOW = 32
_QWEN3_ONLY = ("attn_q_norm", "attn_k_norm", "ffn_norm")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's weights as a Cohere 2 model: three layers of four have a window."""
    folder = tmp_path_factory.mktemp("model")
    write_random_gguf(folder / "qwen3.gguf", SHAPES["tiny"], "q8_0")
    reader, shape = GGUFReader(folder / "qwen3.gguf"), SHAPES["tiny"]
    writer = GGUFWriter(folder / "window.gguf", "cohere2")
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_eps(1e-5)
    writer.add_logit_scale(1.0)
    writer.add_sliding_window(WINDOW)
    writer.add_rope_dimension_count(shape.head_dim)
    names = [field.contents() for field in reader.fields.values() if "ggml.tokens" in field.name]
    merges = [field.contents() for field in reader.fields.values() if "ggml.merges" in field.name]
    add_tokenizer(writer, names[0], [tuple(merge.split(" ")) for merge in merges[0]])
    for tensor in reader.tensors:
        if not any(name in tensor.name for name in _QWEN3_ONLY):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "window.gguf"


@pytest.fixture
def context(path: Path) -> Iterator[Context]:
    made = Context(
        Model(path),
        ContextOptions(n_seq_max=2, n_ctx_slot=256, n_batch=256, threads=1, flash_attn=False),
    )
    yield made
    made.close()


def test_a_restored_state_is_not_cut_into_its_window(context: Context) -> None:
    context.decode([(token, token, 0, False) for token in range(100)])
    context.truncate(0, 80)  # computed here, all of it is there
    context.decode([(token, token, 0, False) for token in range(80, 100)])
    context.restore(1, context.save(0))
    with pytest.raises(DecodeError, match="first 80 tokens of sequence 1"):
        context.truncate(1, 80)
    context.truncate(1, 100)
    context.truncate(1, 0)


async def answer(engine: Engine, prompt: str) -> tuple[list[int], int]:
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    request = GenerationRequest(prompt, engine.tokenize(prompt), sampling)
    deltas = [delta async for delta in engine.submit(request)]
    assert deltas[-1].end is not None
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[-1].end.usage.cached_tokens


async def test_answers_are_the_same_with_a_store(path: Path) -> None:
    story = "Once upon a time there was an old house by the sea where nobody lived any more. " * 2
    prompts = [story + "It was", "Another one. " * 12, story + "He came", story + "It was"]
    said = []
    for cache_ram_bytes in (0, 2**26):
        options = EngineOptions(
            1,
            256,
            1,
            flash_attn=False,
            kv_unified=False,
            cache_ram_bytes=cache_ram_bytes,
            profile_limit_s=0,
        )
        engine = Engine.load(path, options)
        try:
            said.append([(await answer(engine, prompt))[0] for prompt in prompts])
        finally:
            engine.close()
    assert said[0] == said[1]


def test_embeddings_do_not_depend_on_what_shares_a_batch(path: Path) -> None:
    options = EngineOptions(n_slots=2, n_ctx_slot=256, threads=1, n_batch=64, profile_limit_s=0)
    longer = tuple(range(100, 100 + 3 * WINDOW))  # than the window, and than a batch
    texts = [longer, (5, 6, 7), longer[:WINDOW], (8,)]
    engine = Engine.load(path, options)
    try:
        together = engine.embed(texts).result(60)
        alone = [engine.embed([text]).result(60)[0] for text in texts]
    finally:
        engine.close(0)
    whole = Engine.load(path, replace(options, n_batch=256))
    try:
        (in_one_batch,) = whole.embed([longer]).result(60)
    finally:
        whole.close(0)
    assert together == pytest.approx(np.array(alone), rel=0.05, abs=0.02)
    assert together[0] == pytest.approx(in_one_batch, rel=0.05, abs=0.02)


async def test_a_request_longer_than_a_share_and_its_next_turn(path: Path) -> None:
    """Such a model's cache cannot change, so it is unified from the start."""
    options = EngineOptions(2, 512, 1, n_ctx=512, n_batch=64, flash_attn=False, profile_limit_s=0)
    story = "Once upon a time there was an old house by the sea where nobody lived any more. " * 11
    engine = Engine.load(path, options)
    try:
        assert engine.stats().compute.kv_unified
        n_prompt = len(engine.tokenize(story))
        assert options.n_ctx_share < n_prompt < 450
        said, _ = await answer(engine, story)
        _, n_cached = await answer(engine, story + "It was")
    finally:
        engine.close()
    assert n_cached >= n_prompt - 16
    fresh = Engine.load(path, replace(options, n_slots=1, n_ctx=None, kv_unified=False))
    try:
        assert (await answer(fresh, story))[0] == said
    finally:
        fresh.close()
