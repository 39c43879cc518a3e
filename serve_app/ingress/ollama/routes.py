"""Ollama's routes for chats, completions and embeddings.

Source: ollama, docs/api.md.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response

from serve_app.ingress.embeddings.preparation import ComputedVectors
from serve_app.ingress.embeddings.routes import embed, n_tokens
from serve_app.ingress.generation import generation
from serve_app.ingress.http import request_context, sse
from serve_app.ingress.http.dependencies import (
    BodiesArgument,
    ModelsArgument,
    prepared,
    written,
)
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.ollama import embeddings, preparation, serving
from serve_app.ingress.ollama.embeddings import OllamaTexts
from serve_app.ingress.ollama.preparation import OllamaGeneration, OllamaLoad
from serve_app.ingress.ollama.serving import Kind, OllamaAnswer

ROUTER = APIRouter()
"""Errors have Ollama's shape: see `serve_app.ingress.http.errors`. Bodies are read whatever their type is
said to be, as Ollama does: curl says they are forms."""


async def _clock() -> float:
    return time.perf_counter()


BeganArgument = Annotated[float, Depends(_clock)]
"""When the request came, by `time.perf_counter`: a route's first argument."""


@ROUTER.post("/api/chat", response_model=None)
async def ollama_chat(
    began: BeganArgument,
    models: ModelsArgument,
    body: Annotated[OllamaGeneration | OllamaLoad, prepared(preparation.chat, any_type=True)],
) -> Response:
    """Answer a chat, Ollama's way: line by line, unless `stream` is false."""
    return await _respond(models, "chat", body, began)


@ROUTER.post("/api/generate", response_model=None)
async def ollama_generate(
    began: BeganArgument,
    models: ModelsArgument,
    body: Annotated[OllamaGeneration | OllamaLoad, prepared(preparation.generate, any_type=True)],
) -> Response:
    """Answer a prompt, Ollama's way: line by line, unless `stream` is false."""
    return await _respond(models, "generate", body, began)


async def _respond(
    models: Mapping[str, ServedModel], kind: Kind, body: OllamaGeneration | OllamaLoad, began: float
) -> Response:
    if isinstance(body, OllamaLoad):
        engine = find(models, body.model).engine
        if body.reason == "load":
            await engine.load()
        elif request_context.current().is_operator:
            await engine.release()
        return JSONResponse(serving.loaded(kind, body.name, body.reason))
    plan = body.chat.generation
    model = find(models, plan.model)
    started = generation.requests(f"ollama-{uuid.uuid4().hex}", plan)
    answer = OllamaAnswer(
        kind,
        body.name,
        generation.output_parser(model, body.chat, in_pieces=False),
        body.shows_thinking,
        model.tokenizer.piece if body.logprobs else None,
        list(body.chat.prompt) if body.has_context else None,
        began,
    )
    deltas = await generation.start(model, started)
    if not plan.stream:
        return JSONResponse(await answer.whole(deltas))
    lines = serving.events(answer, deltas)
    return sse.EventStream(lines, plan.sse_ping_interval, serving.PING, serving.MEDIA_TYPE)


@ROUTER.post("/api/embed", response_model=None)
async def ollama_embed(
    began: BeganArgument,
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[OllamaTexts, prepared(embeddings.embed, any_type=True)],
) -> Response:
    """Texts as vectors of length 1, Ollama's way."""
    if not body.texts:
        return JSONResponse({"model": body.name, "embeddings": []})
    vectors = await embed(find(models, body.model), body.texts, body.user)
    result = ComputedVectors(
        body.name,
        vectors[:, : body.dimensions],
        n_tokens(body.texts),
        total_ns=round((time.perf_counter() - began) * 1e9),
    )
    return written(await bodies.work(embeddings.several, result.packed()))


@ROUTER.post("/api/embeddings", response_model=None)
async def ollama_embeddings(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[OllamaTexts, prepared(embeddings.embeddings, any_type=True)],
) -> Response:
    """One text as a vector, as Ollama did it before."""
    if not body.texts:
        return JSONResponse({"embedding": []})
    vectors = await embed(find(models, body.model), body.texts)
    result = ComputedVectors(body.name, vectors, n_tokens(body.texts))
    return written(await bodies.work(embeddings.single, result.packed()))
