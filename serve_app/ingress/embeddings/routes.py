"""The routes for embeddings and rankings, OpenAI's way and llama-server's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serve_app.ingress.embeddings import preparation, serving
from serve_app.ingress.embeddings.preparation import Texts
from serve_app.ingress.embeddings.serving import Found, Vectors
from serve_app.ingress.http import request_context
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.workers.bodies import Bodies


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    """Add the routes."""
    _add_embeddings(app, models, bodies)
    _add_rankings(app, models, bodies)


def _add_embeddings(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(request: Request) -> Response:
        """Texts as vectors of length 1, OpenAI's way."""
        asked = await bodies.read(request, preparation.embeddings)
        vectors = await embed(find(models, asked.model), asked.texts, asked.user)
        found = Found(
            asked.model,
            vectors[:, : asked.dimensions],
            _n_tokens(asked.texts),
            asked.encoding_format == "base64",
        )
        return _written(await bodies.work(serving.openai, found.packed()))

    @app.post("/embedding", response_model=None)
    @app.post("/embeddings", response_model=None)
    async def embedding(request: Request) -> Response:
        """Texts as vectors, llama-server's way."""
        model, texts, norm = await bodies.read(request, preparation.llama_embedding)
        served = find(models, model)
        vectors = await embed(served, texts)
        lengths = tuple(map(len, texts)) if served.tokenizer.pooling == "none" else None
        found = Found(model, vectors, _n_tokens(texts), norm=norm, lengths=lengths)
        return _written(await bodies.work(serving.llama, found.packed()))


def _written(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")


def _add_rankings(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.post("/v1/rerank", response_model=None)
    @app.post("/v1/reranking", response_model=None)
    @app.post("/rerank", response_model=None)
    @app.post("/reranking", response_model=None)
    async def rerank(request: Request) -> Response:
        """How relevant documents are to a query, the most relevant first."""
        model, texts, top_n, is_tei = await bodies.read(request, preparation.rerank)
        scores = (await embed(find(models, model), texts))[:, 0]
        ranked = np.argsort(-scores, kind="stable")[:top_n].tolist()
        if is_tei:
            return JSONResponse([{"index": i, "score": float(scores[i])} for i in ranked])
        results = [{"index": i, "relevance_score": float(scores[i])} for i in ranked]
        used = serving.usage(_n_tokens(texts))
        return JSONResponse({"model": model, "object": "list", "usage": used, "results": results})


async def embed(model: ServedModel, texts: Texts, user: str | None = None) -> Vectors:
    """The texts' vectors, charged to the caller. Raises KeyLimitError or RateLimitError for what that one
    may not, and what the engine does."""
    caller = request_context.current()
    caller.admit(texts)
    vectors = await model.engine.embed(texts, caller.client(user), background=caller.yields)
    caller.computed()
    return vectors


def _n_tokens(texts: Texts) -> int:
    return sum(map(len, texts))
