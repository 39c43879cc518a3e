"""Embeddings through the `openai` package, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from gguf import PoolingType
from numpy.typing import NDArray

from tests.e2e.conftest import Corral, model
from tests.integration.models.embedding_models import write_reranker
from tools.random_models.encoder import SHAPES, write_encoder

SENTENCES = ["What is the capital of France?", "List three fruits.", "Tell me a story about a fox."]
DEMO = 2  # its place among the server's models
N_AFTER = 5
"""One after the other: in this time others would be computed, too, if somebody still wanted them."""


@pytest.fixture
def client(corral: Corral) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors(answer: openai.types.CreateEmbeddingResponse) -> NDArray[np.float64]:
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return np.array([one.embedding for one in answer.data])


def test_texts_one_by_one_and_together(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="demo", input=SENTENCES)
    together = vectors(answer)
    assert np.linalg.norm(together, axis=1) == pytest.approx([1] * 3, abs=1e-5)
    alone = [client.embeddings.create(model="demo", input=text) for text in SENTENCES]
    for one, row in zip(alone, together, strict=True):
        assert vectors(one)[0] @ row > 0.9999
    assert answer.usage.prompt_tokens == sum(one.usage.total_tokens for one in alone)
    assert answer.model == "demo"


def test_token_arrays_are_the_texts(corral: Corral, client: openai.OpenAI) -> None:
    tokens = [
        corral.http.post("/tokenize", json={"content": text, "model": "demo"}).json()["tokens"]
        for text in SENTENCES
    ]
    texts = vectors(client.embeddings.create(model="demo", input=SENTENCES))
    arrays = vectors(client.embeddings.create(model="demo", input=tokens))
    assert (texts * arrays).sum(axis=1) == pytest.approx([1] * 3, abs=1e-4)
    one = vectors(client.embeddings.create(model="demo", input=tokens[0]))
    assert one[0] @ texts[0] > 0.9999


def test_base64_is_the_same_as_floats(client: openai.OpenAI) -> None:
    """The client asks for base64 unless it is told otherwise, and decodes that itself."""
    packed = vectors(client.embeddings.create(model="demo", input="A fox"))
    plain = vectors(client.embeddings.create(model="demo", input="A fox", encoding_format="float"))
    assert packed == pytest.approx(plain, abs=1e-5)


def test_dimensions(client: openai.OpenAI) -> None:
    whole = vectors(client.embeddings.create(model="demo", input="A fox"))[0]
    short = vectors(client.embeddings.create(model="demo", input="A fox", dimensions=16))[0]
    assert short == pytest.approx(whole[:16] / np.linalg.norm(whole[:16]), abs=1e-4)
    with pytest.raises(openai.BadRequestError, match="embeddings have") as bad:
        client.embeddings.create(model="demo", input="A fox", dimensions=len(whole) + 1)
    assert bad.value.param == "dimensions"


def test_too_long_a_text_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.embeddings.create(model="demo", input=[[1], [1] * 2049])
    assert bad.value.code == "context_length_exceeded"
    assert "2049 tokens; this model takes 2048" in str(bad.value)


async def test_many_small_requests_share_batches(corral: Corral) -> None:
    n_requests = 32

    async def n_batches() -> int:
        """Of so many requests at once."""
        before = corral.stats(DEMO)["embeddings"]
        async with openai.AsyncOpenAI(base_url=f"{corral.url}/v1", api_key="none") as many:
            answers = await asyncio.gather(
                *(
                    many.embeddings.create(model="demo", input=f"Text {i} of {'very ' * 100}many")
                    for i in range(n_requests)
                )
            )
        after = corral.stats(DEMO)["embeddings"]
        assert len({tuple(answer.data[0].embedding) for answer in answers}) == n_requests
        assert after["embedded_texts"] - before["embedded_texts"] == n_requests
        return int(after["embedding_batches"] - before["embedding_batches"])

    # On a busy machine, all may come one after the other.
    async with asyncio.timeout(60):
        while await n_batches() >= n_requests:
            pass


def test_who_leaves_is_not_computed_for(corral: Corral, client: openai.OpenAI) -> None:
    before = corral.stats(DEMO)["embeddings"]["embedded_texts"]
    with pytest.raises(openai.APITimeoutError):
        client.embeddings.create(model="demo", input=[[5] * 1000] * 512, timeout=2)
    client.embeddings.create(model="demo", input="The next one is served.")
    done = corral.stats(DEMO)["embeddings"]["embedded_texts"]
    for number in range(N_AFTER):
        client.embeddings.create(model="demo", input=f"So is number {number}.")
    assert corral.stats(DEMO)["embeddings"]["embedded_texts"] == done + N_AFTER
    assert done < before + 512


def test_llama_servers_route(corral: Corral, client: openai.OpenAI) -> None:
    expected = vectors(client.embeddings.create(model="demo", input=SENTENCES))
    body = {"content": SENTENCES, "model": "demo"}
    found = corral.http.post("/embedding", json=body).json()
    assert [one["index"] for one in found] == [0, 1, 2]
    for one, row in zip(found, expected, strict=True):
        (vector,) = one["embedding"]
        assert np.array(vector) @ row > 0.9999


def test_a_chat_model_does_not_rank(corral: Corral) -> None:
    body = {"query": "fox", "documents": SENTENCES, "model": "demo"}
    answer = corral.http.post("/v1/rerank", json=body)
    assert answer.status_code == 501
    assert "cannot rank" in answer.json()["error"]["message"]


@pytest.mark.long
def test_models_that_are_made_for_it(
    start: Callable[[list[dict[str, Any]]], Corral], tmp_path: Path
) -> None:
    bert, ranker, moods = (tmp_path / f"{name}.gguf" for name in ("bert", "ranker", "moods"))
    write_encoder(bert, SHAPES["tiny"], PoolingType.CLS)
    write_reranker(ranker, template="{query}: {document}")
    write_encoder(moods, SHAPES["tiny"], PoolingType.RANK, labels=("joy", "anger", "fear"))
    rank = model(ranker, "ranker", n_slots=2, n_ctx_slot=256)
    corral = start([model(bert, "bert"), rank, model(moods, "moods")])
    corral.wait_ready()
    documents = ["an animal", "a very old house", "nothing"]
    body = {"query": "fox", "documents": documents, "top_n": 2, "model": "ranker"}
    ranked = corral.http.post("/v1/rerank", json=body).json()["results"]
    assert len(ranked) == 2
    assert ranked[0]["relevance_score"] > ranked[1]["relevance_score"]
    texts = ["the fox", "a cat story"]
    body = {"input": texts, "model": "moods"}
    classes = corral.http.post("/v1/classify", json=body).json()["data"]
    plain = corral.http.post("/v1/classify", json=body | {"use_activation": False}).json()["data"]
    for one, raw in zip(classes, plain, strict=True):
        odds = np.exp(raw["probs"])
        assert one["probs"] == pytest.approx(odds / odds.sum())
        assert one["label"] == ("joy", "anger", "fear")[np.argmax(odds)]
    assert classes[0]["probs"] != pytest.approx(classes[1]["probs"])
    with openai.OpenAI(base_url=f"{corral.url}/v1", api_key="none", max_retries=0) as client:
        found = vectors(client.embeddings.create(model="bert", input=texts))
        assert np.linalg.norm(found, axis=1) == pytest.approx([1, 1], abs=1e-5)
        with pytest.raises(openai.BadRequestError, match="it cannot generate"):
            client.completions.create(model="bert", prompt="the fox")
        with pytest.raises(openai.InternalServerError, match="Use /v1/rerank"):
            client.embeddings.create(model="ranker", input=texts)
