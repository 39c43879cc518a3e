"""The routes for embeddings and rankings, OpenAI's way and llama-server's."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from serve_app.errors import CorralError
from serve_app.ingress.embeddings import preparation
from serve_app.ingress.embeddings.preparation import (
    ComputedVectors,
    Texts,
    TextsToEmbed,
    Vectors,
    usage,
)
from serve_app.ingress.http import request_context
from serve_app.ingress.http.dependencies import (
    BodiesArgument,
    ModelsArgument,
    prepared,
    written,
)
from serve_app.ingress.model_registry import ServedModel, family, find

ROUTER = APIRouter()


@ROUTER.post("/v1/embeddings", response_model=None)
async def embeddings(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[TextsToEmbed, prepared(preparation.embeddings)],
) -> Response:
    """Texts as vectors of length 1, OpenAI's way."""
    vectors = await embed(find(models, body.model), body.texts, body.user)
    result = ComputedVectors(
        body.model, n_tokens(body.texts), body.dimensions, body.encoding_format == "base64"
    )
    return written(await bodies.work(preparation.openai_answer, *result.pieces(vectors)))


@ROUTER.post("/embedding", response_model=None)
@ROUTER.post("/embeddings", response_model=None)
async def embedding(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[tuple[str, Texts, int], prepared(preparation.llama_embedding)],
) -> Response:
    """Texts as vectors, llama-server's way."""
    model_id, texts, norm = body
    model = find(models, model_id)
    vectors = await embed(model, texts)
    lengths = tuple(map(len, texts)) if model.tokenizer.pooling == "none" else None
    result = ComputedVectors(model_id, n_tokens(texts), norm=norm, lengths=lengths)
    return written(await bodies.work(preparation.llama_answer, *result.pieces(vectors)))


@ROUTER.post("/v1/rerank", response_model=None)
@ROUTER.post("/v1/reranking", response_model=None)
@ROUTER.post("/rerank", response_model=None)
@ROUTER.post("/reranking", response_model=None)
async def rerank(
    models: ModelsArgument,
    body: Annotated[tuple[str, Texts, int | None, bool], prepared(preparation.rerank)],
) -> Response:
    """How relevant documents are to a query, the most relevant first."""
    model, texts, top_n, is_tei = body
    scores = (await embed(find(models, model), texts))[:, 0]
    ranked = np.argsort(-scores, kind="stable")[:top_n].tolist()
    if is_tei:
        return JSONResponse([{"index": i, "score": float(scores[i])} for i in ranked])
    results = [{"index": i, "relevance_score": float(scores[i])} for i in ranked]
    used = usage(n_tokens(texts))
    return JSONResponse({"model": model, "object": "list", "usage": used, "results": results})


async def embed(model: ServedModel, texts: Texts, user: str | None = None) -> Vectors:
    """The texts' vectors, charged to the caller. Raises KeyLimitError or RateLimitError for what that one
    may not, and what the engine does."""
    caller = request_context.current()
    caller.check_model(model.id, family(model))
    await caller.admit(texts)
    try:
        vectors = await model.engine.embed(
            texts, caller.client(user), background=caller.is_background
        )
    except CorralError:
        caller.count(model.id, {"refused": 1})
        raise
    caller.computed()
    caller.count(model.id, {"requests": 1, "completed": 1, "prompt_tokens": n_tokens(texts)})
    return vectors


def n_tokens(texts: Texts) -> int:
    return sum(map(len, texts))
