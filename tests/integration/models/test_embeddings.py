"""Embeddings with llama.cpp and the built-in model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.errors import TextTooLongError
from serve_app.base.formats import BackendName, EmbeddingPooling
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.reference import reference

PATH = BUILTIN_MODEL
OPTIONS = EngineOptions(
    n_slots=4, n_ctx_slot=512, threads=1, n_batch=64, flash_attn=False, profile_limit_s=0
)
TEXTS = [
    "Hello there!",
    "What is the capital of Portugal?",
    "Tell me a story about a brave fox. " * 12,  # longer than a batch
    "x",
    *(f"List {n} fruits, and {n + 1} animals." for n in range(2, 12)),
]
POOLINGS: dict[EmbeddingPooling, int] = {
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine.load(PATH, OPTIONS)
    yield engine
    engine.close(0)


def embed(engine: Engine, texts: Sequence[str]) -> NDArray[np.float32]:
    return engine.embed([engine.tokenize(text) for text in texts]).result(60)


def cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (a, b)]
    found: NDArray[np.float32] = (unit[0] * unit[1]).sum(axis=1)
    return found


def test_batched_vectors_are_those_of_each_text_alone(engine: Engine) -> None:
    before = engine.stats()
    together = embed(engine, TEXTS)
    after = engine.stats()
    n_batches = after.embeddings.embedding_batches - before.embeddings.embedding_batches
    assert n_batches < len(TEXTS)
    assert after.embeddings.embedded_texts - before.embeddings.embedded_texts == len(TEXTS)
    alone = np.vstack([embed(engine, [text]) for text in TEXTS])
    assert together.shape == alone.shape
    assert cosines(together, alone).min() > 0.9999


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_llama_cpps(pooling: EmbeddingPooling) -> None:
    engine = Engine.load(PATH, replace(OPTIONS, embedding_pooling=pooling))
    try:
        with reference(PATH, 512, embedding=True, pooling_type=POOLINGS[pooling]) as llama:
            expected = np.array([llama.embed(text) for text in TEXTS], np.float32)
            found = embed(engine, TEXTS)
    finally:
        engine.close(0)
    assert cosines(found, expected).min() > 0.9999
    assert np.linalg.norm(found, axis=1) == pytest.approx(
        np.linalg.norm(expected, axis=1), rel=0.01
    )


@pytest.mark.parametrize("backend", ["llama.cpp", "openvino"])
def test_a_text_is_as_long_as_a_request(engine: Engine, backend: BackendName) -> None:
    """And longer than a slot's share, for which the context grows in the middle of a text."""
    long = engine.tokenize("Tell me a story about a brave fox. " * 99)[:512]
    texts = [long[:100], long, long[:300], long[:50]]
    flash_attn = True if backend == "openvino" else OPTIONS.flash_attn
    options = replace(OPTIONS, n_ctx=512, backend=backend, flash_attn=flash_attn)
    pooled = Engine.load(PATH, options)
    try:
        found = np.vstack([pooled.embed([text]).result(60) for text in texts])
        assert options.n_ctx_share == 128
        with pytest.raises(TextTooLongError, match="takes 512"):
            pooled.embed([(*long, 5)])
    finally:
        pooled.close(0)
    assert cosines(found, engine.embed(texts).result(60)).min() > 0.999


def test_vectors_of_all_tokens(engine: Engine) -> None:
    plain = Engine.load(PATH, replace(OPTIONS, embedding_pooling="none"))
    try:
        lengths = [len(plain.tokenize(text)) for text in TEXTS]
        found = np.split(embed(plain, TEXTS), np.cumsum(lengths)[:-1])
    finally:
        plain.close(0)
    means = np.array([vectors.mean(axis=0) for vectors in found])
    assert cosines(means, embed(engine, TEXTS)).min() > 0.9999


def test_any_model_ranks_if_it_is_told_to() -> None:
    """As at llama-server with `--reranking`: of a model without a classifier, the score is made of the last
    token's vector, which llama.cpp takes for the classes' logits of Qwen3's architecture."""
    tokenizer = Tokenizer(PATH, pooling="rank")
    assert (tokenizer.reranks, Tokenizer(PATH).reranks) == (True, False)
    pairs = [tokenizer.encode_pair("story", text) for text in TEXTS[:4]]
    numbers = []
    poolings: tuple[EmbeddingPooling, ...] = ("rank", "last")
    for pooling in poolings:
        engine = Engine.load(PATH, replace(OPTIONS, embedding_pooling=pooling))
        try:
            numbers.append(engine.embed(pairs).result(60))
        finally:
            engine.close(0)
    assert numbers[0].shape == (4, 1)
    shares = np.exp(numbers[1] - numbers[1].max(axis=1, keepdims=True))
    assert numbers[0][:, 0] == pytest.approx(shares[:, 0] / shares.sum(axis=1), rel=0.05)


def test_longer_texts_than_a_batch_need_several(engine: Engine) -> None:
    before = engine.stats().embeddings.embedding_batches
    text = engine.tokenize(TEXTS[2])
    assert len(text) > OPTIONS.n_batch
    engine.embed([text]).result(60)
    assert engine.stats().embeddings.embedding_batches - before == -(-len(text) // OPTIONS.n_batch)


async def test_generation_beside_it_keeps_its_text(engine: Engine) -> None:
    prompts = ["Tell me a story about a cat.", "Once upon a time", "List three animals."]
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    async def say(name: str, prompt: str) -> str:
        request = GenerationRequest(name, engine.tokenize(prompt), sampling)
        return "".join([delta.text async for delta in engine.submit(request)])

    alone = [await say(f"alone-{i}", prompt) for i, prompt in enumerate(prompts)]
    vectors = embed(engine, TEXTS)
    streams = [asyncio.create_task(say(f"b-{i}", prompt)) for i, prompt in enumerate(prompts)]
    steps, beside = engine.stats().timing.steps, []
    while not all(stream.done() for stream in streams):
        texts = [engine.tokenize(text) for text in TEXTS]
        beside.append(await asyncio.wrap_future(engine.embed(texts)))
    assert [await stream for stream in streams] == alone
    assert engine.stats().timing.steps - steps >= 60
    assert beside
    assert all(cosines(found, vectors).min() > 0.9999 for found in beside)


def test_who_never_asks_pays_nothing(engine: Engine) -> None:
    """Neither memory nor time: the second context is made at the first request."""
    fresh = Engine.load(PATH, OPTIONS)
    try:
        backend = fresh.core.backend
        assert backend.embeddings._context is None  # type: ignore[attr-defined]
        fresh.embed([(1, 2)]).result(60)
        assert backend.embeddings._context is not None  # type: ignore[attr-defined]
    finally:
        fresh.close(0)
