"""Ollama's routes for chats, completions and embeddings.

Source: ollama, docs/api.md.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serve_app.ingress.embeddings.routes import embed as compute
from serve_app.ingress.generation import chat, generation
from serve_app.ingress.http import request_context, sse
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.ollama import embeddings, model_routes, preparation, serving
from serve_app.ingress.ollama.preparation import Load
from serve_app.ingress.ollama.serving import Kind, OllamaAnswer
from serve_app.ingress.workers.bodies import Bodies


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    """Add the routes. Their errors have Ollama's shape; see `serve_app.ingress.http.errors`. Bodies are
    read whatever their type is said to be, as Ollama does: curl says they are forms."""
    _add_generation(app, models, bodies)
    _add_embeddings(app, models, bodies)
    model_routes.add(app, models, bodies)


def _add_generation(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.post("/api/chat", response_model=None)
    async def ollama_chat(request: Request) -> Response:
        """Answer a chat, Ollama's way: line by line, unless `stream` is false."""
        began = time.perf_counter()
        asked = await bodies.read(request, preparation.chat, any_type=True)
        return await _respond(models, "chat", asked, began)

    @app.post("/api/generate", response_model=None)
    async def ollama_generate(request: Request) -> Response:
        """Answer a prompt, Ollama's way: line by line, unless `stream` is false."""
        began = time.perf_counter()
        asked = await bodies.read(request, preparation.generate, any_type=True)
        return await _respond(models, "generate", asked, began)


async def _respond(
    models: Mapping[str, ServedModel], kind: Kind, asked: preparation.Asked | Load, began: float
) -> Response:
    if isinstance(asked, Load):
        engine = find(models, asked.model).engine
        if asked.reason == "load":
            await engine.load()
        elif request_context.current().is_operator:
            await engine.release()
        return JSONResponse(serving.loaded(kind, asked.name, asked.reason))
    wanted = asked.chat.generation
    model = find(models, wanted.model)
    started = generation.requests(f"ollama-{uuid.uuid4().hex}", wanted)
    answer = OllamaAnswer(
        kind,
        asked.name,
        chat.parser(model, asked.chat, in_pieces=False),
        asked.shows_thinking,
        model.tokenizer.piece if asked.logprobs else None,
        list(asked.chat.prompt) if asked.has_context else None,
        began,
    )
    deltas = await generation.start(model, started)
    if not wanted.stream:
        return JSONResponse(await answer.whole(deltas))
    lines = serving.events(answer, deltas)
    return sse.EventStream(lines, wanted.sse_ping_interval, serving.PING, serving.MEDIA_TYPE)


def _add_embeddings(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.post("/api/embed", response_model=None)
    async def ollama_embed(request: Request) -> Response:
        """Texts as vectors of length 1, Ollama's way."""
        began = time.perf_counter()
        asked = await bodies.read(request, embeddings.embed, any_type=True)
        if not asked.texts:
            return JSONResponse({"model": asked.name, "embeddings": []})
        vectors = await compute(find(models, asked.model), asked.texts, asked.user)
        total_ns = round((time.perf_counter() - began) * 1e9)
        n_tokens = sum(map(len, asked.texts))
        found = embeddings.Found(asked.name, vectors[:, : asked.dimensions], n_tokens, total_ns)
        return _written(await bodies.work(embeddings.several, found.packed()))

    @app.post("/api/embeddings", response_model=None)
    async def ollama_embeddings(request: Request) -> Response:
        """One text as a vector, as Ollama did it before."""
        asked = await bodies.read(request, embeddings.embeddings, any_type=True)
        if not asked.texts:
            return JSONResponse({"embedding": []})
        vectors = await compute(find(models, asked.model), asked.texts)
        found = embeddings.Found(asked.name, vectors, sum(map(len, asked.texts)), 0)
        return _written(await bodies.work(embeddings.one, found.packed()))


def _written(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
