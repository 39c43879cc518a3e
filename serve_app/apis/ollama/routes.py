"""Ollama's routes.

Source: ollama, docs/api.md and server/routes.go.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from serve_app.apis.ollama import catalogue, preparation, serving
from serve_app.apis.ollama.preparation import ModelChange, OllamaLoad, PreparedOllamaAnswer
from serve_app.apis.ollama.protocol import OllamaErrorResponse
from serve_app.apis.ollama.serving import Kind, OllamaAnswer, PullLines
from serve_app.base.errors import EngineUnavailableError, PermissionDeniedError
from serve_app.server.access.bodies import mark_unread
from serve_app.server.answering import streaming
from serve_app.server.answering.vectors import TextsToEmbed, compute
from serve_app.server.http import request_context
from serve_app.server.http.dependencies import (
    BodiesArgument,
    ModelsArgument,
    bytes_response,
    operators_only,
    prepare_with,
)
from serve_app.server.http.description import CHAT, also, api_router
from serve_app.server.model_control import ModelControlArgument, PullProgress
from serve_app.server.model_registry import ServedModel, find, full_name, usable

ROUTER = api_router(OllamaErrorResponse)
"""Errors have Ollama's shape: see `serve_app.server.http.errors`. Bodies are read whatever their type is
said to be, as Ollama does: curl says they are forms."""
_IN_LINES = also("application/x-ndjson")


async def _clock() -> float:
    return time.perf_counter()


BeganArgument = Annotated[float, Depends(_clock)]
"""The time when the request came, by `time.perf_counter`: a route's first argument."""


@ROUTER.post("/api/chat", responses=_IN_LINES)
async def ollama_chat(
    began: BeganArgument,
    models: ModelsArgument,
    body: Annotated[
        PreparedOllamaAnswer | OllamaLoad,
        prepare_with(preparation.prepare_chat, any_type=True, example=CHAT | {"stream": False}),
    ],
) -> Response:
    """Answer a chat, Ollama's way: line by line, unless `stream` is false."""
    return await _respond(models, "chat", body, began)


@ROUTER.post("/api/generate", responses=_IN_LINES)
async def ollama_generate(
    began: BeganArgument,
    models: ModelsArgument,
    body: Annotated[
        PreparedOllamaAnswer | OllamaLoad,
        prepare_with(
            preparation.generate,
            any_type=True,
            example={"prompt": "Tell me a story.", "stream": False},
        ),
    ],
) -> Response:
    """Answer a prompt, Ollama's way: line by line, unless `stream` is false."""
    return await _respond(models, "generate", body, began)


async def _respond(
    models: Mapping[str, ServedModel],
    kind: Kind,
    body: PreparedOllamaAnswer | OllamaLoad,
    began: float,
) -> Response:
    if isinstance(body, OllamaLoad):
        engine = find(models, body.model).engine
        if body.reason == "load":
            await engine.load()
        elif request_context.current().is_operator:
            await engine.release()
        return JSONResponse(serving.load_answer(kind, body.name, body.reason))
    plan = body.chat.generation
    model = find(models, plan.model)
    answer = OllamaAnswer(
        kind,
        body.name,
        streaming.output_parser(model, body.chat, in_pieces=False),
        body.shows_thinking,
        model.tokenizer.piece if plan.sampling.logprobs is not None else None,
        list(body.chat.prompt) if body.has_context else None,
        began,
    )
    return await answer.respond(model, plan, f"ollama-{uuid.uuid4().hex}")


@ROUTER.post("/api/embed")
async def ollama_embed(
    began: BeganArgument,
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed, prepare_with(preparation.embed, any_type=True, example={"input": ["A fox."]})
    ],
) -> Response:
    """Texts as vectors of length 1, Ollama's way."""
    if not body.texts:
        return JSONResponse({"model": body.name, "embeddings": []})
    pieces = await compute(models, body, began)
    return bytes_response(await bodies.work(preparation.several, *pieces))


@ROUTER.post("/api/embeddings")
async def ollama_embeddings(
    models: ModelsArgument,
    bodies: BodiesArgument,
    body: Annotated[
        TextsToEmbed,
        prepare_with(preparation.embed_prompt, any_type=True, example={"prompt": "A fox."}),
    ],
) -> Response:
    """A text as a vector, as Ollama did it before."""
    if not body.texts:
        return JSONResponse({"embedding": []})
    return bytes_response(await bodies.work(preparation.single, *await compute(models, body)))


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
    """The models' descriptions, which are kept as long as the models stay the same."""
    state = request.app.state
    files = [(model.tokenizer, model.adapters) for model in state.models.values()]
    if getattr(state, "ollama_described", None) != files:
        state.ollama_descriptions = await bodies.work(catalogue.describe_models)
        state.ollama_described = files if len(state.ollama_descriptions) == len(files) else None
    descriptions: Descriptions = state.ollama_descriptions
    return descriptions


DescriptionsArgument = Annotated[Descriptions, Depends(_descriptions)]


def _entry(name: str, described: dict[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    name = full_name(name)
    return {"name": name, "model": name, **{field: described[field] for field in fields}}


@ROUTER.get("/api/tags")
async def ollama_tags(models: ModelsArgument, described: DescriptionsArgument) -> dict[str, Any]:
    """The models that you may use by all of their names, the default first, Ollama's way."""
    models = usable(models)
    aliases = [(name, model.id) for model in models.values() for name in model.aliases]
    names = [(name, name) for name in models] + [entry for entry in aliases if entry[0] != "*"]
    listed = [(name, described[model_id]) for name, model_id in names if model_id in described]
    return {"models": [_entry(name, model, _LISTED) for name, model in listed]}


@ROUTER.post("/api/show")
async def ollama_show(
    model_id: Annotated[str, prepare_with(catalogue.model_id, any_type=True, example={})],
    described: DescriptionsArgument,
) -> Response:
    """The details and capabilities of a model, Ollama's way."""
    if model_id not in described:
        raise EngineUnavailableError(f"The file of the model {model_id} cannot be read.")
    return JSONResponse({field: described[model_id][field] for field in _SHOWN})


@ROUTER.get("/api/ps")
async def ollama_ps(models: ModelsArgument, described: DescriptionsArgument) -> dict[str, Any]:
    """The models that have an engine now, Ollama's way."""
    models = usable(models)
    answers = await asyncio.gather(*(model.engine.stats() for model in models.values()))
    expires_at = serving.timestamp(time.time() + _FOR_EVER_S)
    return {
        "models": [
            _entry(model_id, described[model_id], (*_NAMED, "context_length"))
            | {"expires_at": expires_at, "size_vram": 0}
            for model_id, of_model in zip(models, answers, strict=True)
            if model_id in described and (of_model.found or of_model.missing)
        ]
    }


@ROUTER.get("/api/version")
async def ollama_version() -> dict[str, str]:
    """The version of Ollama whose API this is."""
    return {"version": VERSION}


async def _running(_: Request) -> Response:
    return PlainTextResponse("Ollama is running")


_MANAGING = operators_only("What models are served")


@ROUTER.post(
    "/api/pull", response_model=PullProgress, responses=_IN_LINES, dependencies=[_MANAGING]
)
async def ollama_pull(
    control: ModelControlArgument,
    change: Annotated[ModelChange, prepare_with(preparation.pull, any_type=True)],
) -> Response:
    """Download a model of a hub, and serve it. For operators."""
    return await PullLines().respond(control.pull(change.name), in_lines=change.in_lines)


@ROUTER.post(
    "/api/create", response_model=PullProgress, responses=_IN_LINES, dependencies=[_MANAGING]
)
async def ollama_create(
    control: ModelControlArgument,
    change: Annotated[ModelChange, prepare_with(preparation.create, any_type=True)],
) -> Response:
    """Serve a model under another name, with other defaults. For operators."""
    steps = control.create(change.name, change.origin, change.sections)
    return await PullLines().respond(steps, in_lines=change.in_lines)


@ROUTER.post("/api/copy", dependencies=[_MANAGING])
async def ollama_copy(
    control: ModelControlArgument,
    change: Annotated[ModelChange, prepare_with(preparation.copy, any_type=True)],
) -> dict[str, str]:
    """Serve a model under another name, too. For operators."""
    await control.copy(change.origin, change.name)
    return {}


@ROUTER.delete("/api/delete", dependencies=[_MANAGING])
async def ollama_delete(
    control: ModelControlArgument,
    change: Annotated[ModelChange, prepare_with(preparation.delete, any_type=True)],
) -> dict[str, str]:
    """Serve a model no more that was added. For operators."""
    await control.delete(change.name)
    return {}


@mark_unread
async def _refuse(request: Request) -> Response:
    raise PermissionDeniedError(
        "Models come from hubs only: requests cannot push any, nor send files. Pull the model, or add it "
        "to `models` in the configuration."
    )


ROUTER.add_route("/", _running, ["GET"])  # browsers get the page before, if there is one
ROUTER.add_route("/api/push", _refuse, ["POST"])
ROUTER.add_route("/api/blobs/{digest}", _refuse, ["GET", "POST"])
