"""Models that are made for embeddings, or to rank, with llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader, PoolingType
from numpy.typing import NDArray

from serve_app.apis.embeddings import preparation
from serve_app.base.errors import TextTooLongError
from serve_app.base.formats import BackendName
from serve_app.engine import Engine, EngineOptions, GenerationRequest, InvalidRequestError
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.server.model_registry import ModelInfo
from tests.doubles.api import prepared
from tests.integration.models.embedding_models import write_reranker
from tests.integration.reference import reference
from tools.random_models.encoder import SHAPES, write_encoder

OPTIONS = EngineOptions(
    n_slots=4, n_ctx_slot=256, threads=1, n_batch=32, flash_attn=False, profile_limit_s=0
)
TEXTS = ["the fox", "a cat story " * 8, "x", "the story", "abc fox cat"]
DOCUMENTS = ["a fox", "an animal that lives in the woods " * 9, "no"]


@contextmanager
def running(path: Path, options: EngineOptions = OPTIONS) -> Iterator[Engine]:
    engine = Engine.load(path, options)
    try:
        yield engine
    finally:
        engine.close(0)


def both_ways(
    engine: Engine, texts: Sequence[tuple[int, ...]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Together, and one by one."""
    alone = [engine.embed([text]).result(60) for text in texts]
    return engine.embed(texts).result(60), np.vstack(alone)


def reference_vectors(path: Path, texts: Sequence[str]) -> NDArray[np.float64]:
    """What llama-cpp-python's own class finds, with the model's own pooling."""
    with reference(path, 256, embedding=True) as llama:
        return np.array([llama.embed(text) for text in texts])


def reference_scores(path: Path, pairs: Sequence[tuple[int, ...]]) -> NDArray[np.float64]:
    """The same of a reranking model, of which that class would read more numbers than there are."""
    scores = []
    with reference(path, 256, embedding=True) as llama:
        for pair in pairs:
            llama._ctx.kv_cache_clear()  # type: ignore[no-untyped-call]
            llama._batch.reset()  # type: ignore[no-untyped-call]
            llama._batch.add_sequence(pair, 0, True)
            llama._ctx.decode(llama._batch)
            outputs = llama_cpp.llama_get_embeddings_seq(llama._ctx.ctx, 0)
            scores.append([outputs[0], outputs[1]])
    return np.array(scores)


@pytest.mark.parametrize("pooling", [PoolingType.CLS, PoolingType.MEAN], ids=lambda one: one.name)
def test_tokens_that_see_the_whole_text(tmp_path: Path, pooling: PoolingType) -> None:
    path = tmp_path / "bert.gguf"
    write_encoder(path, SHAPES["tiny"], pooling)
    tokenizer = Tokenizer(path)
    with running(path) as engine:
        before = engine.stats().embeddings.embedding_batches
        together, alone = both_ways(
            engine, [tokenizer.encode_for_embedding(text) for text in TEXTS]
        )
        assert engine.stats().embeddings.embedding_batches - before == 1 + len(TEXTS)
    assert together == pytest.approx(alone, abs=1e-5)
    assert together == pytest.approx(reference_vectors(path, TEXTS), abs=1e-4)
    assert together.shape == (len(TEXTS), tokenizer.model.n_embd)
    body = json.dumps({"input": TEXTS, "inputs": TEXTS}).encode()
    models = {"m": ModelInfo("m", 256, tokenizer)}
    for prepare in (preparation.embeddings, preparation.tei_embed):
        assert prepared(prepare, models, body).texts == (
            *map(tokenizer.encode_for_embedding, TEXTS),
        )


def test_the_table_of_positions_ends_before_the_slot(tmp_path: Path) -> None:
    path = tmp_path / "bert.gguf"
    write_encoder(path, SHAPES["tiny"], PoolingType.CLS)
    with running(path) as engine:
        assert engine.embed([(2,) * SHAPES["tiny"].n_ctx]).result(60).shape[0] == 1
        with pytest.raises(TextTooLongError, match=f"takes {SHAPES['tiny'].n_ctx}"):
            engine.embed([(2,) * (SHAPES["tiny"].n_ctx + 1)])


@pytest.mark.parametrize("backend", ["llama.cpp", "openvino"])
def test_a_text_of_an_encoder_is_as_long_as_a_request(tmp_path: Path, backend: BackendName) -> None:
    """One long text is computed at a time, beside short ones; other batches are a slot's share."""
    shape = replace(SHAPES["tiny"], n_ctx=600)
    path = write_encoder(tmp_path / "bert.gguf", shape, PoolingType.MEAN)
    options = replace(OPTIONS, n_ctx_slot=1000, n_ctx=1024, flash_attn=True, backend=backend)
    long, short = (2, *range(5, 25)) * 28, (2, 5, 6, 3)
    with running(path, options) as engine:
        assert engine.stats().n_ctx_slot == 600
        texts = [short, long, long[:300], short, long[:600]]
        together, alone = both_ways(engine, texts)
        assert together == pytest.approx(alone, abs=1e-4)
        with pytest.raises(TextTooLongError, match="takes 600"):
            engine.embed([(2,) * 601])
        whole = engine.embed([long[:600]]).result(60)
    with running(path, replace(options, n_ctx=None, backend="llama.cpp")) as engine:
        assert whole == pytest.approx(engine.embed([long[:600]]).result(60), abs=1e-3)


def test_such_a_model_does_not_generate(tmp_path: Path) -> None:
    path = tmp_path / "bert.gguf"
    write_encoder(path, SHAPES["tiny"], PoolingType.CLS)
    with running(path) as engine:
        (refusal,) = engine.submit_to([(GenerationRequest("a", (2, 5)), lambda _: None)])
        assert isinstance(refusal, InvalidRequestError)
        assert "cannot generate" in refusal.message
        memory = engine.stats().memory
        assert (memory.cache_bytes, memory.cache_bytes_per_slot) == (0, 0)
        assert engine.embed([(2, 5)]).result(60).shape[0] == 1


def test_a_reranker_with_an_encoder(tmp_path: Path) -> None:
    path = tmp_path / "bert.gguf"
    write_encoder(path, SHAPES["tiny"], PoolingType.RANK)
    tokenizer = Tokenizer(path)
    assert tokenizer.reranks
    cls, sep = 2, 3
    fox, cat = (tokenizer.tokenize(text, False, False) for text in ("the fox", "a cat"))
    pair = tokenizer.encode_pair("the fox", "a cat")
    assert pair == (cls, *fox, sep, *cat)  # llama-server's rule for such a vocabulary
    with running(path) as engine:
        pairs = [tokenizer.encode_pair("the fox", text) for text in TEXTS]
        together, alone = both_ways(engine, pairs)
    assert together.shape == (len(TEXTS), 1)
    assert together == pytest.approx(alone, abs=1e-6)
    assert len(np.unique(together.round(5))) == len(TEXTS)


@pytest.mark.parametrize("pooling", [PoolingType.RANK, PoolingType.CLS], ids=lambda one: one.name)
def test_a_classifier(tmp_path: Path, pooling: PoolingType) -> None:
    """Its outputs are those of its two layers for the first token's vector. Without a pooling type for it,
    as llama.cpp converts classifiers, the configuration makes it one."""
    labels, shape = ("joy", "anger", "fear"), SHAPES["tiny"]
    path = write_encoder(tmp_path / "classifier.gguf", shape, pooling, labels=labels)
    plain = write_encoder(tmp_path / "plain.gguf", shape, PoolingType.CLS)
    tokenizer = Tokenizer(path, pooling="rank")
    assert (tokenizer.labels, tokenizer.reranks) == (labels, False)
    assert Tokenizer(plain).labels == Tokenizer(plain, pooling="rank").labels == ()
    texts = [tokenizer.encode_for_embedding(text) for text in TEXTS]
    with running(path, replace(OPTIONS, embedding_pooling="rank")) as engine:
        before = engine.stats().embeddings.embedding_batches
        together, alone = both_ways(engine, texts)
        assert engine.stats().embeddings.embedding_batches - before == 1 + len(TEXTS)
    with running(plain) as engine:
        vectors = engine.embed(texts).result(60)
    found = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    hidden = np.tanh(vectors @ found["cls.weight"].T + found["cls.bias"])
    expected = hidden @ found["cls.output.weight"].T + found["cls.output.bias"]
    assert together == pytest.approx(expected, abs=1e-4)
    assert together == pytest.approx(alone, abs=1e-6)
    assert np.ptp(together, axis=0).min() > 1e-3  # texts differ by more than by rounding


def test_a_reranker_with_a_decoder(tmp_path: Path) -> None:
    """Its score is the last token's: a pair that is longer than a batch goes on in the next one."""
    path = tmp_path / "reranker.gguf"
    write_reranker(path, template="Q: {query} D: {document} A:")
    tokenizer = Tokenizer(path)
    pairs = [tokenizer.encode_pair("What is a fox?", text) for text in DOCUMENTS]
    texts = [f"Q: What is a fox? D: {text} A:" for text in DOCUMENTS]
    assert [tokenizer.decode(pair) for pair in pairs] == texts
    assert max(map(len, pairs)) > OPTIONS.n_batch
    with running(path) as engine:
        together, alone = both_ways(engine, pairs)
    assert together == pytest.approx(alone, abs=1e-5)
    assert (tokenizer.labels, tokenizer.reranks) == (("yes", "no"), True)
    assert together == pytest.approx(reference_scores(path, pairs), abs=1e-4)
    assert tokenizer.model.has_softmax
    assert together.sum(axis=1) == pytest.approx(np.ones(len(pairs)))


def test_without_a_template_a_pair_is_joined_by_the_vocabularys_rules(tmp_path: Path) -> None:
    path = tmp_path / "reranker.gguf"
    write_reranker(path, template=None)
    tokenizer = Tokenizer(path)
    parts = [tokenizer.tokenize(text, False, False) for text in ("a fox", "an animal")]
    assert tokenizer.encode_pair("a fox", "an animal") == (*parts[0], *parts[1])
