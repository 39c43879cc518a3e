"""Embeddings and rankings, OpenAI's way and llama-server's."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray

from serve_app.ingress.embeddings import preparation
from serve_app.ingress.embeddings.preparation import Texts
from serve_app.ingress.http import request_context
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.workers.bodies import Bodies

Vectors = NDArray[np.float32]

_INT16_MAX = 32760.0  # what llama-server makes of the largest number with `embd_normalize: 0`


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    """Add the routes."""
    _add_embeddings(app, models, bodies)
    _add_rankings(app, models, bodies)


def _add_embeddings(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(request: Request) -> Response:
        """Texts as vectors of length 1, OpenAI's way."""
        asked = await bodies.read(request, preparation.embeddings)
        vectors = await _embed(find(models, asked.model), asked.texts)
        shortened = normalized(vectors[:, : asked.dimensions], 2)
        as_base64 = asked.encoding_format == "base64"
        return JSONResponse(
            {
                "object": "list",
                "model": asked.model,
                "data": [
                    {
                        "object": "embedding",
                        "index": i,
                        "embedding": in_base64(vector) if as_base64 else vector.tolist(),
                    }
                    for i, vector in enumerate(shortened)
                ],
                "usage": _usage(asked.texts),
            }
        )

    @app.post("/embedding", response_model=None)
    @app.post("/embeddings", response_model=None)
    async def embedding(request: Request) -> Response:
        """Texts as vectors, llama-server's way."""
        model, texts, kind = await bodies.read(request, preparation.llama_embedding)
        vectors = normalized(await _embed(find(models, model), texts), kind)
        return JSONResponse(
            [{"index": i, "embedding": [vector.tolist()]} for i, vector in enumerate(vectors)]
        )


def _add_rankings(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.post("/v1/rerank", response_model=None)
    @app.post("/v1/reranking", response_model=None)
    @app.post("/rerank", response_model=None)
    @app.post("/reranking", response_model=None)
    async def rerank(request: Request) -> Response:
        """How relevant documents are to a query, the most relevant first."""
        model, texts, top_n = await bodies.read(request, preparation.rerank)
        scores = (await _embed(find(models, model), texts))[:, 0]
        ranked = np.argsort(-scores, kind="stable")[:top_n].tolist()
        results = [{"index": i, "relevance_score": float(scores[i])} for i in ranked]
        return JSONResponse(
            {"model": model, "object": "list", "usage": _usage(texts), "results": results}
        )


async def _embed(model: ServedModel, texts: Texts) -> Vectors:
    """Raises KeyLimitError or RateLimitError for what the caller may not, and what the engine does."""
    request_context.current().admit(texts)
    return await model.engine.embed(texts)


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
