"""The routes for embeddings, rankings and classes, OpenAI's way and llama-server's."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Annotated

import numpy as np
from fastapi.responses import JSONResponse, Response

from serve_app.errors import CorralError, InvalidRequestError
from serve_app.ingress.embeddings import preparation
from serve_app.ingress.embeddings.preparation import (
    ComputedVectors,
    PairsToRank,
    Texts,
    TextsToEmbed,
    Vectors,
    usage,
)
from serve_app.ingress.http import request_context
from serve_app.ingress.http.dependencies import BodiesArgument, ModelsArgument, prepared, written
from serve_app.ingress.http.description import api_router
from serve_app.ingress.http.sse import Json
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.workers.wire import Piece
from serve_app.types import Medium

ROUTER = api_router()


@ROUTER.post("/v1/embeddings")
async def embeddings(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[TextsToEmbed, prepared(preparation.embeddings, example={"input": ["A fox."]})],
) -> Response:
    """Texts, with pictures or without, as vectors of length 1, OpenAI's way."""
    return written(await bodies.work(preparation.openai_answer, *await computed(models, body)))


@ROUTER.post("/embedding")
@ROUTER.post("/embeddings")
async def embedding(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed, prepared(preparation.llama_embedding, example={"input": "A fox."})
    ],
) -> Response:
    """Texts, with pictures or without, as vectors, llama-server's way."""
    return written(await bodies.work(preparation.llama_answer, *await computed(models, body)))


@ROUTER.post("/embed")
async def tei_embed(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[TextsToEmbed, prepared(preparation.tei_embed, example={"inputs": ["A fox."]})],
) -> Response:
    """Texts as a list of vectors, as text-embeddings-inference answers."""
    return written(await bodies.work(preparation.tei_answer, *await computed(models, body)))


@ROUTER.post("/v1/classify")
@ROUTER.post("/classify")
async def classify(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed, prepared(preparation.classify, example={"input": ["A fox.", "A brave fox."]})
    ],
) -> Response:
    """The most likely class of each text, and the probabilities of all, as vLLM answers."""
    return written(await bodies.work(preparation.classify_answer, *await computed(models, body)))


async def computed(
    models: Mapping[str, ServedModel], body: TextsToEmbed, began: float = math.nan
) -> tuple[Piece, ...]:
    """A request's vectors, for the worker that writes the answer, and the time that they took, for a
    request that came at `began`. Raises CorralError."""
    model = find(models, body.model)
    n_tokens, vectors = await embed(model, body.texts, body.user, body.media)
    lengths = None
    if model.tokenizer.pooling == "none":
        if body.media:
            raise InvalidRequestError("Pictures need another pooling type than 'none'.", "model")
        lengths = tuple(map(len, body.texts))
    name = body.name or body.model
    total_ns = 0 if math.isnan(began) else round((time.perf_counter() - began) * 1e9)
    form = body.dimensions, body.as_base64, body.norm, lengths, total_ns
    return ComputedVectors(name, n_tokens, *form).pieces(vectors)


@ROUTER.post("/v1/rerank")
@ROUTER.post("/v1/reranking")
@ROUTER.post("/v2/rerank")
@ROUTER.post("/rerank")
@ROUTER.post("/reranking")
async def rerank(
    models: ModelsArgument,
    body: Annotated[
        PairsToRank,
        prepared(
            preparation.rerank,
            example={"query": "Where is Lisbon?", "documents": ["In Portugal.", "A fox."]},
        ),
    ],
) -> Response:
    """How relevant documents are to a query, the most relevant first."""
    n_tokens, vectors = await embed(find(models, body.model), body.texts)
    scores = vectors[:, 0]
    ranked = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    name = "score" if body.is_tei else "relevance_score"
    results: list[Json] = [{"index": i, name: float(scores[i])} for i in ranked]
    if body.documents is not None:
        for result in results:
            text = {"text": body.documents[result["index"]]}
            result |= text if body.is_tei else {"document": text}
    if body.is_tei:
        return JSONResponse(results)
    used = usage(n_tokens)
    return JSONResponse({"model": body.model, "object": "list", "usage": used, "results": results})


@ROUTER.post("/v1/score")
@ROUTER.post("/score")
async def score(
    models: ModelsArgument,
    body: Annotated[
        PairsToRank,
        prepared(
            preparation.score,
            example={"queries": "Where is Lisbon?", "documents": ["In Portugal."]},
        ),
    ],
) -> Response:
    """The score of each pair of a query and a document, in the request's order."""
    n_tokens, vectors = await embed(find(models, body.model), body.texts)
    scores = vectors[:, :1].astype(np.float64)
    if body.is_logistic:
        scores = preparation.probabilities(scores)
    data = [
        {"index": i, "object": "score", "score": one} for i, (one,) in enumerate(scores.tolist())
    ]
    used = usage(n_tokens)
    return JSONResponse({"model": body.model, "object": "list", "usage": used, "data": data})


async def embed(
    model: ServedModel, texts: Texts, user: str | None = None, media: tuple[Medium, ...] = ()
) -> tuple[int, Vectors]:
    """The number of tokens of texts and their media, and the texts' vectors, charged to the caller. Raises
    KeyLimitError or RateLimitError for what the caller may not, and what the engine does."""
    caller = request_context.current()
    caller.check_model(model.id)
    await caller.admit(texts)
    n_tokens = sum(map(len, texts)) - len(media)
    try:
        if media:
            n_tokens += await model.engine.media_tokens([medium.size for medium in media])
        vectors = await model.engine.embed(
            texts, caller.client(user), background=caller.is_background, media=media
        )
    except CorralError:
        caller.count(model.id, {"refused": 1})
        raise
    caller.computed()
    caller.count(model.id, {"requests": 1, "completed": 1, "prompt_tokens": n_tokens})
    return n_tokens, vectors
