"""Embeddings and rankings, OpenAI's way and llama-server's."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray

from serve_app.errors import InvalidRequestError, TextTooLongError
from serve_app.ingress.embeddings.protocol import (
    EmbeddingsRequest,
    LlamaEmbeddingRequest,
    RerankRequest,
)
from serve_app.ingress.generation.tokenization import apart, refuse_unknown_tokens
from serve_app.ingress.http import request_context
from serve_app.ingress.llama_server import routes
from serve_app.ingress.model_registry import ServedModel, find

Texts = tuple[tuple[int, ...], ...]
Vectors = NDArray[np.float32]

_INT16_MAX = 32760.0  # what llama-server makes of the largest number with `embd_normalize: 0`


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the routes."""
    _add_embeddings(app, models)
    _add_rankings(app, models)


def _add_embeddings(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingsRequest) -> Response:
        """Texts as vectors of length 1, OpenAI's way."""
        model = find(models, body.model)
        _check_makes_embeddings(model)
        n_embd = model.tokenizer.n_embd
        if body.dimensions is not None and body.dimensions > n_embd:
            message = f"dimensions: this model's embeddings have {n_embd}."
            raise InvalidRequestError(message, "dimensions")
        texts = await _encode(model, body.texts)
        _admit(model, texts, "input")
        vectors = await model.engine.embed(texts, _client(body.user))
        shortened = normalized(vectors[:, : body.dimensions], 2)
        as_base64 = body.encoding_format == "base64"
        return JSONResponse(
            {
                "object": "list",
                "model": model.id,
                "data": [
                    {
                        "object": "embedding",
                        "index": i,
                        "embedding": in_base64(vector) if as_base64 else vector.tolist(),
                    }
                    for i, vector in enumerate(shortened)
                ],
                "usage": _usage(texts),
            }
        )

    @app.post("/embedding", response_model=None)
    @app.post("/embeddings", response_model=None)
    async def embedding(body: LlamaEmbeddingRequest) -> Response:
        """Texts as vectors, llama-server's way."""
        model = find(models, body.model)
        _check_makes_embeddings(model)
        texts = tuple([await routes.encode(model, text, "content") for text in body.texts])
        _admit(model, texts, "content")
        vectors = normalized(await model.engine.embed(texts, _client()), body.embd_normalize)
        return JSONResponse(
            [{"index": i, "embedding": [vector.tolist()]} for i, vector in enumerate(vectors)]
        )


def _add_rankings(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.post("/v1/rerank", response_model=None)
    @app.post("/v1/reranking", response_model=None)
    @app.post("/rerank", response_model=None)
    @app.post("/reranking", response_model=None)
    async def rerank(body: RerankRequest) -> Response:
        """How relevant documents are to a query, the most relevant first."""
        model = find(models, body.model)
        if not model.tokenizer.reranks:
            raise InvalidRequestError(
                f"The model {model.id!r} cannot rank: its file names no pooling of the type 'rank', "
                "as those of reranking models do.",
                "model",
            )

        def encode() -> Texts:
            return tuple(model.tokenizer.encode_pair(body.query, text) for text in body.documents)

        texts = await apart(sum(map(len, body.documents)), encode)
        _admit(model, texts, "documents")
        scores = (await model.engine.embed(texts, _client()))[:, 0]
        ranked = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
        results = [{"index": i, "relevance_score": float(scores[i])} for i in ranked]
        return JSONResponse(
            {"model": model.id, "object": "list", "usage": _usage(texts), "results": results}
        )


async def _encode(model: ServedModel, texts: Sequence[str | list[int]]) -> Texts:
    tokenizer = model.tokenizer
    for text in texts:
        if not isinstance(text, str):
            refuse_unknown_tokens(model, "input", text)

    def encode() -> Texts:
        return tuple(
            tokenizer.encode(text) if isinstance(text, str) else tuple(text) for text in texts
        )

    return await apart(sum(map(len, texts)), encode)


def _check_makes_embeddings(model: ServedModel) -> None:
    if model.tokenizer.reranks:
        raise InvalidRequestError(
            f"The model {model.id!r} ranks, and makes no embeddings: use /v1/rerank.", "model"
        )


def _admit(model: ServedModel, texts: Texts, field: str) -> None:
    """Raises TextTooLongError for the model, KeyLimitError or RateLimitError for the caller."""
    longest = max(map(len, texts))
    if longest > model.n_ctx_slot:
        raise TextTooLongError(longest, model.n_ctx_slot, field)
    request_context.current().admit(texts)


def _client(user: str | None = None) -> str:
    return request_context.current().client(user)


def _usage(texts: Texts) -> dict[str, Any]:
    n_tokens = sum(map(len, texts))
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}


def normalized(vectors: Vectors, kind: int) -> Vectors:
    """Each row divided by its norm, by llama-server's `embd_normalize`; rows of zeros stay."""
    if kind < 0:
        return vectors
    sizes = np.abs(vectors.astype(np.float64))
    if kind == 0:
        norms = sizes.max(axis=1, keepdims=True) / _INT16_MAX
    else:
        norms = (sizes**kind).sum(axis=1, keepdims=True) ** (1 / kind)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def in_base64(vector: Vectors) -> str:
    """As OpenAI's clients read it: little-endian 32-bit floats."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
