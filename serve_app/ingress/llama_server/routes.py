"""llama-server's own routes, under its names.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from serve_app.errors import NotSupportedError
from serve_app.ingress.generation import generation
from serve_app.ingress.http import request_context, sse
from serve_app.ingress.http.dependencies import (
    ModelsArgument,
    operators_only,
    prepared,
    written,
)
from serve_app.ingress.llama_server import metrics as llama_metrics
from serve_app.ingress.llama_server import preparation, serving
from serve_app.ingress.llama_server.preparation import PreparedLlamaCompletion
from serve_app.ingress.llama_server.protocol import MEDIA_MARKER
from serve_app.ingress.llama_server.serving import LlamaAnswer
from serve_app.ingress.llama_server.slots import slots_of
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.openai.serving import BUILD
from serve_app.sampling import SamplingParams

_STARTED_S = time.time()
ROUTER = APIRouter()


@ROUTER.post("/completion", response_model=None)
@ROUTER.post("/completions", response_model=None)
async def completion(
    models: ModelsArgument,
    body: Annotated[PreparedLlamaCompletion, prepared(preparation.completion)],
) -> Response:
    """Continue texts, llama-server's way."""
    return await _respond(models, body)


@ROUTER.post("/infill", response_model=None)
async def infill(
    models: ModelsArgument, body: Annotated[PreparedLlamaCompletion, prepared(preparation.infill)]
) -> Response:
    """Fill in what is between two texts, for models with tokens for that."""
    return await _respond(models, body)


async def _respond(models: Mapping[str, ServedModel], body: PreparedLlamaCompletion) -> Response:
    plan = body.generation
    model = find(models, plan.model)
    started = generation.requests(f"cmpl-{uuid.uuid4().hex}", plan)
    choices = [
        LlamaAnswer(
            index=i,
            prompt=body.prompt_texts[i // plan.n],
            n_prompt=len(request.prompt),
            n_ctx_slot=model.n_ctx_slot,
            asked=body,
            sampling=request.sampling,
            piece=model.tokenizer.piece,
            eog=model.tokenizer.eog_tokens,
        )
        for i, request in enumerate(started)
    ]
    deltas = await generation.start(model, started)
    if plan.stream:
        return sse.EventStream(serving.events(choices, deltas), plan.sse_ping_interval)
    answers = await serving.collect(choices, deltas)
    return JSONResponse(answers if body.is_batch else answers[0])


@ROUTER.post("/tokenize", response_model=None)
async def tokenize(answer: Annotated[bytes, prepared(preparation.tokenize)]) -> Response:
    """A text's tokens."""
    return written(answer)


@ROUTER.post("/detokenize", response_model=None)
async def detokenize(answer: Annotated[bytes, prepared(preparation.detokenize)]) -> Response:
    """The text of tokens."""
    return written(answer)


@ROUTER.post("/apply-template", response_model=None)
async def apply_template(
    answer: Annotated[bytes, prepared(preparation.apply_template)],
) -> Response:
    """A chat as the text that the model gets."""
    return written(answer)


@ROUTER.get("/props")
async def props(
    request: Request, models: ModelsArgument, model: str | None = None
) -> dict[str, Any]:
    """The model's settings. The slots are those of all its replicas that answer in time, and
    `missing` names the others. Operators are told where its file is."""
    caller = request_context.current()
    path_of = str if caller.is_operator else os.path.basename
    served = find(models, model)
    usual = SamplingParams(**served.defaults.sampling, max_tokens=served.defaults.max_tokens)
    defaults = serving.generation_settings(usual, served.n_ctx_slot, served.id)
    slots = await slots_of(served)
    return {
        "missing": slots.missing,
        "default_generation_settings": {
            "id": 0,
            "id_task": -1,
            "n_ctx": served.n_ctx_slot,
            "speculative": False,
            "is_processing": False,
            "params": defaults,
            "prompt": "",
        },
        "total_slots": len(slots.found),
        "model_alias": served.id,
        "model_ftype": served.tokenizer.file_type,
        "model_path": path_of(served.tokenizer.path),
        "chat_template": served.tokenizer.chat_template or "",
        "chat_template_caps": served.tokenizer.template_caps.reported(),
        "bos_token": served.tokenizer.bos,
        "eos_token": served.tokenizer.eos,
        "media_marker": MEDIA_MARKER,
        "modalities": {"vision": served.sees, "video": False, "audio": served.hears},
        "build_info": BUILD,
        "endpoint_slots": True,
        "endpoint_props": caller.is_operator and caller.account is not None,
        "endpoint_metrics": True,
        "is_sleeping": False,
        "ui": request.app.state.has_ui,
        "ui_settings": {},
        "cors_proxy_enabled": False,
    }


async def _keys_only() -> None:
    if request_context.current().account is None:
        raise NotSupportedError("To change properties, send an API key with admin: true.")


@ROUTER.post(
    "/props",
    include_in_schema=False,
    dependencies=[operators_only("What is done to properties"), Depends(_keys_only)],
)
async def change_props(
    _: Annotated[None, prepared(preparation.properties, optional=True)],
) -> dict[str, bool]:
    """Change properties, for keys with `admin`: as at llama-server, there are none yet that can be, so
    what is sent is named as ignored."""
    return {"success": True}


@ROUTER.get("/metrics", response_class=PlainTextResponse)
async def metrics(models: ModelsArgument, model: str | None = None) -> Response:
    """llama-server's metrics, summed over the replicas of the model."""
    answers = await find(models, model).engine.stats()
    text = llama_metrics.render(answers.found, len(answers.missing))
    began = {"Process-Start-Time-Unix": str(int(_STARTED_S))}
    return Response(text, headers=began, media_type=CONTENT_TYPE_LATEST)
