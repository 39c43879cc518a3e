"""Ollama's routes.

Source: ollama, docs/api.md and server/routes.go.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from serve_app.errors import PermissionDeniedError
from serve_app.ingress.access.bodies import unread
from serve_app.ingress.embeddings.preparation import ComputedVectors
from serve_app.ingress.embeddings.routes import embed, n_tokens
from serve_app.ingress.generation import generation
from serve_app.ingress.http import request_context
from serve_app.ingress.http.dependencies import (
    BodiesArgument,
    ModelsArgument,
    prepared,
    written,
)
from serve_app.ingress.model_registry import ServedModel, find, full_name
from serve_app.ingress.ollama import catalogue, preparation, serving
from serve_app.ingress.ollama.preparation import OllamaGeneration, OllamaLoad, OllamaTexts
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
    answer = OllamaAnswer(
        kind,
        body.name,
        generation.output_parser(model, body.chat, in_pieces=False),
        body.shows_thinking,
        model.tokenizer.piece if plan.sampling.logprobs is not None else None,
        list(body.chat.prompt) if body.has_context else None,
        began,
    )
    return await answer.respond(model, plan, f"ollama-{uuid.uuid4().hex}")


@ROUTER.post("/api/embed", response_model=None)
async def ollama_embed(
    began: BeganArgument,
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[OllamaTexts, prepared(preparation.embed, any_type=True)],
) -> Response:
    """Texts as vectors of length 1, Ollama's way."""
    if not body.texts:
        return JSONResponse({"model": body.name, "embeddings": []})
    vectors = await embed(find(models, body.model), body.texts, body.user)
    result = ComputedVectors(
        body.name,
        n_tokens(body.texts),
        body.dimensions,
        total_ns=round((time.perf_counter() - began) * 1e9),
    )
    return written(await bodies.work(preparation.several, *result.pieces(vectors)))


@ROUTER.post("/api/embeddings", response_model=None)
async def ollama_embeddings(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[OllamaTexts, prepared(preparation.embeddings, any_type=True)],
) -> Response:
    """A text as a vector, as Ollama did it before."""
    if not body.texts:
        return JSONResponse({"embedding": []})
    vectors = await embed(find(models, body.model), body.texts)
    result = ComputedVectors(body.name, n_tokens(body.texts))
    return written(await bodies.work(preparation.single, *result.pieces(vectors)))


VERSION = "0.32.15"
"""The version of Ollama whose API this is. Clients ask for a least one."""


_FOR_EVER_S = 100 * 365 * 86400
"""Models stay loaded; some clients cannot read a year of five digits."""
_NAMED = ("size", "digest", "details")
_LISTED = (*_NAMED, "modified_at", "capabilities")
_SHOWN = (
    *("modelfile", "parameters", "template", "license", "details", "model_info"),
    *("capabilities", "modified_at"),
)
Descriptions = dict[str, dict[str, Any]]


async def _descriptions(request: Request, bodies: BodiesArgument) -> Descriptions:
    """The models' descriptions, which are kept."""
    state = request.app.state
    if not hasattr(state, "ollama_descriptions"):
        state.ollama_descriptions = await bodies.work(catalogue.describe)
    described: Descriptions = state.ollama_descriptions
    return described


DescriptionsArgument = Annotated[Descriptions, Depends(_descriptions)]


def _named(name: str, described: dict[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    name = full_name(name)
    return {"name": name, "model": name, **{field: described[field] for field in fields}}


@ROUTER.get("/api/tags")
async def ollama_tags(models: ModelsArgument, described: DescriptionsArgument) -> dict[str, Any]:
    """The models that are served here by all of their names, the default first, Ollama's way."""
    aliases = [(name, model.id) for model in models.values() for name in model.aliases]
    names = [(name, name) for name in models] + [entry for entry in aliases if entry[0] != "*"]
    return {"models": [_named(name, described[model_id], _LISTED) for name, model_id in names]}


@ROUTER.post("/api/show", response_model=None)
async def ollama_show(
    model_id: Annotated[str, prepared(catalogue.named, any_type=True)],
    described: DescriptionsArgument,
) -> Response:
    """The details and capabilities of a model, Ollama's way."""
    return JSONResponse({field: described[model_id][field] for field in _SHOWN})


@ROUTER.get("/api/ps")
async def ollama_ps(models: ModelsArgument, described: DescriptionsArgument) -> dict[str, Any]:
    """The models that have an engine now, Ollama's way."""
    answers = await asyncio.gather(*(model.engine.stats() for model in models.values()))
    expires_at = serving.timestamp(time.time() + _FOR_EVER_S)
    return {
        "models": [
            _named(model_id, described[model_id], (*_NAMED, "context_length"))
            | {"expires_at": expires_at, "size_vram": 0}
            for model_id, of_model in zip(models, answers, strict=True)
            if of_model.found or of_model.missing
        ]
    }


@ROUTER.get("/api/version")
async def ollama_version() -> dict[str, str]:
    """The version of Ollama whose API this is."""
    return {"version": VERSION}


async def _running(_: Request) -> Response:
    return PlainTextResponse("Ollama is running")


@unread
async def _refuse_to_change_models(request: Request) -> Response:
    raise PermissionDeniedError(
        "This server's models are those of its configuration: requests cannot pull, create, copy, push "
        "or delete any. Add the model to `models` in the configuration file, and start or "
        "deploy it again."
    )


ROUTER.add_route("/", _running, ["GET"])  # browsers get the page before, if there is one
for path in ("/api/pull", "/api/push", "/api/create", "/api/copy"):
    ROUTER.add_route(path, _refuse_to_change_models, ["POST"])
ROUTER.add_route("/api/delete", _refuse_to_change_models, ["DELETE"])
ROUTER.add_route("/api/blobs/{digest}", _refuse_to_change_models, ["GET", "POST"])
