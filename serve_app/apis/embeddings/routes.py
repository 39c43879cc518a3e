"""The routes for embeddings, rankings and classes, OpenAI's way and llama-server's."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray

from serve_app.apis.embeddings import preparation
from serve_app.apis.embeddings.preparation import PairsToRank, usage_json
from serve_app.server.answering.vectors import TextsToEmbed, Vectors, compute, embed
from serve_app.server.http.dependencies import (
    BodiesArgument,
    ModelsArgument,
    bytes_response,
    prepare_with,
)
from serve_app.server.http.description import api_router
from serve_app.server.http.sse import Json
from serve_app.server.model_registry import ServedModel, find

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


@ROUTER.post("/")
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


@ROUTER.post("/v2/embed")
async def cohere_embed(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed, prepare_with(preparation.cohere_embed, example={"texts": ["A fox."]})
    ],
) -> Response:
    """Texts, with pictures or without, as vectors in several forms, Cohere's way."""
    return bytes_response(
        await bodies.work(preparation.cohere_answer, *await compute(models, body))
    )


@ROUTER.get("/info")
async def tei_info(models: ModelsArgument, model: str | None = None) -> dict[str, Any]:
    """A model as text-embeddings-inference describes the one that it serves."""
    return preparation.describe_as_tei(find(models, model, ("embeddings", "rerank", "classify")))


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
    return await _rank(models, body)


@ROUTER.post("/v2/rerank")
async def cohere_rerank(
    models: ModelsArgument,
    body: Annotated[
        PairsToRank,
        prepare_with(
            preparation.cohere_rerank,
            example={"query": "Where is Lisbon?", "documents": ["In Portugal.", "A fox."]},
        ),
    ],
) -> Response:
    """How relevant documents are to a query, between 0 and 1, Cohere's way."""
    return await _rank(models, body)


async def _rank(models: Mapping[str, ServedModel], body: PairsToRank) -> Response:
    n_tokens, vectors = await embed(find(models, body.model), body.texts)
    scores = _scores(body, vectors)
    ranked = np.argsort(-scores, kind="stable")[: body.top_n].tolist()
    is_list = body.form in ("tei", "sglang")
    name = "score" if is_list else "relevance_score"
    results: list[Json] = [{"index": i, name: float(scores[i])} for i in ranked]
    if body.documents is not None:
        for result in results:
            text = body.documents[result["index"]]
            in_its_form = {"tei": {"text": text}, "sglang": {"document": text}}
            result |= in_its_form.get(body.form, {"document": {"text": text}})
    if is_list:
        return JSONResponse(results)
    answer = {"model": body.model, "object": "list", "usage": usage_json(n_tokens)}
    if body.form == "cohere":
        meta = preparation.cohere_meta(search_units=1, input_tokens=n_tokens)
        answer |= {"id": str(uuid.uuid4()), "meta": meta}
    return JSONResponse(answer | {"results": results})


def _scores(body: PairsToRank, vectors: Vectors) -> NDArray[np.float64]:
    """The score of each pair, as the request wants it."""
    scores = vectors[:, :1].astype(np.float64)
    if body.is_logistic:
        scores = preparation.probabilities(scores)
    return scores[:, 0]


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
    scores = _scores(body, vectors).tolist()
    data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]
    used = usage_json(n_tokens)
    return JSONResponse({"model": body.model, "object": "list", "usage": used, "data": data})
