"""The routes for embeddings, rankings and classes, OpenAI's way and llama-server's."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi.responses import JSONResponse, Response

from serve_app.apis.embeddings import preparation
from serve_app.apis.embeddings.preparation import PairsToRank, usage_json
from serve_app.server.answering.vectors import TextsToEmbed, compute, embed
from serve_app.server.http.dependencies import (
    BodiesArgument,
    ModelsArgument,
    bytes_response,
    prepare_with,
)
from serve_app.server.http.description import api_router
from serve_app.server.http.sse import Json
from serve_app.server.model_registry import find

ROUTER = api_router()


@ROUTER.post("/v1/embeddings")
async def embeddings(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed, prepare_with(preparation.embeddings, example={"input": ["A fox."]})
    ],
) -> Response:
    """Texts, with pictures or without, as vectors of length 1, OpenAI's way."""
    return bytes_response(
        await bodies.work(preparation.openai_answer, *await compute(models, body))
    )


@ROUTER.post("/embedding")
@ROUTER.post("/embeddings")
async def embedding(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed, prepare_with(preparation.llama_embedding, example={"input": "A fox."})
    ],
) -> Response:
    """Texts, with pictures or without, as vectors, llama-server's way."""
    return bytes_response(await bodies.work(preparation.llama_answer, *await compute(models, body)))


@ROUTER.post("/embed")
async def tei_embed(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed, prepare_with(preparation.tei_embed, example={"inputs": ["A fox."]})
    ],
) -> Response:
    """Texts as a list of vectors, as text-embeddings-inference answers."""
    return bytes_response(await bodies.work(preparation.tei_answer, *await compute(models, body)))


@ROUTER.post("/v1/classify")
@ROUTER.post("/classify")
async def classify(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed,
        prepare_with(preparation.classify, example={"input": ["A fox.", "A brave fox."]}),
    ],
) -> Response:
    """The most likely class of each text, and the probabilities of all, as vLLM answers."""
    return bytes_response(
        await bodies.work(preparation.classify_answer, *await compute(models, body))
    )


@ROUTER.post("/v1/rerank")
@ROUTER.post("/v1/reranking")
@ROUTER.post("/v2/rerank")
@ROUTER.post("/rerank")
@ROUTER.post("/reranking")
async def rerank(
    models: ModelsArgument,
    body: Annotated[
        PairsToRank,
        prepare_with(
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
    used = usage_json(n_tokens)
    return JSONResponse({"model": body.model, "object": "list", "usage": used, "results": results})


@ROUTER.post("/v1/score")
@ROUTER.post("/score")
async def score(
    models: ModelsArgument,
    body: Annotated[
        PairsToRank,
        prepare_with(
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
    used = usage_json(n_tokens)
    return JSONResponse({"model": body.model, "object": "list", "usage": used, "data": data})
