"""llama-server's own routes, under its names.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from serve_app.errors import NotSupportedError
from serve_app.ingress.generation import generation
from serve_app.ingress.http import request_context, sse
from serve_app.ingress.llama_server import metrics as llama_metrics
from serve_app.ingress.llama_server import preparation, serving
from serve_app.ingress.llama_server import slots as llama_slots
from serve_app.ingress.llama_server.preparation import Completion
from serve_app.ingress.llama_server.protocol import MEDIA_MARKER
from serve_app.ingress.llama_server.serving import LlamaAnswer
from serve_app.ingress.llama_server.slots import slots_of
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.openai.serving import BUILD
from serve_app.ingress.workers.bodies import Bodies
from serve_app.sampling import SamplingParams

_STARTED_S = time.time()


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    """Add the routes."""
    _add_generation(app, models, bodies)
    _add_text(app, bodies)
    _add_information(app, models, bodies)
    llama_slots.add(app, models, bodies)


def _add_generation(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.post("/completion", response_model=None)
    @app.post("/completions", response_model=None)
    async def completion(request: Request) -> Response:
        """Continue texts, llama-server's way."""
        return await _respond(models, await bodies.read(request, preparation.completion))

    @app.post("/infill", response_model=None)
    async def infill(request: Request) -> Response:
        """Fill in what is between two texts, for models with tokens for that."""
        return await _respond(models, await bodies.read(request, preparation.infill))


async def _respond(models: Mapping[str, ServedModel], asked: Completion) -> Response:
    wanted = asked.generation
    model = find(models, wanted.model)
    started = generation.requests(f"cmpl-{uuid.uuid4().hex}", wanted)
    choices = [
        LlamaAnswer(
            index=i,
            prompt=asked.prompt_texts[i // wanted.n],
            n_prompt=len(request.prompt),
            n_ctx_slot=model.n_ctx_slot,
            asked=asked,
            sampling=request.sampling,
            piece=model.tokenizer.piece,
            eog=model.tokenizer.eog_tokens,
        )
        for i, request in enumerate(started)
    ]
    deltas = await generation.start(model, started)
    if wanted.stream:
        return sse.EventStream(serving.events(choices, deltas), wanted.sse_ping_interval)
    found = await serving.collect(choices, deltas)
    return JSONResponse(found if asked.is_batch else found[0])


def _add_text(app: FastAPI, bodies: Bodies) -> None:
    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        """A text's tokens."""
        return _written(await bodies.read(request, preparation.tokenize))

    @app.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        return _written(await bodies.read(request, preparation.detokenize))

    @app.post("/apply-template", response_model=None)
    async def apply_template(request: Request) -> Response:
        """A chat as the text that the model gets."""
        return _written(await bodies.read(request, preparation.apply_template))


def _written(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")


def _add_information(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.get("/props")
    async def props(request: Request, model: str | None = None) -> dict[str, Any]:
        """The model's settings. The slots are those of all its replicas that answer in time, and
        `missing` names the others. Operators are told where its file is."""
        caller = request_context.current()
        path_of = str if caller.is_operator else os.path.basename
        found = find(models, model)
        usual = SamplingParams(**found.defaults.sampling, max_tokens=found.defaults.max_tokens)
        defaults = serving.generation_settings(usual, found.n_ctx_slot, found.id)
        slots = await slots_of(found)
        return {
            "missing": slots.missing,
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": found.n_ctx_slot,
                "speculative": False,
                "is_processing": False,
                "params": defaults,
                "prompt": "",
            },
            "total_slots": len(slots.found),
            "model_alias": found.id,
            "model_ftype": found.tokenizer.file_type,
            "model_path": path_of(found.tokenizer.path),
            "chat_template": found.tokenizer.chat_template or "",
            "chat_template_caps": found.tokenizer.template_caps,
            "bos_token": found.tokenizer.bos,
            "eos_token": found.tokenizer.eos,
            "media_marker": MEDIA_MARKER,
            "modalities": {"vision": found.sees, "video": False, "audio": found.hears},
            "build_info": BUILD,
            "endpoint_slots": True,
            "endpoint_props": caller.is_operator and caller.account is not None,
            "endpoint_metrics": True,
            "is_sleeping": False,
            "ui": request.app.state.has_ui,
            "ui_settings": {},
            "cors_proxy_enabled": False,
        }

    @app.post("/props", include_in_schema=False)
    async def change_props(request: Request) -> dict[str, bool]:
        """Change properties, for keys with `admin`: as at llama-server, there are none yet that can be, so
        what is sent is named as ignored."""
        caller = request_context.current()
        caller.check_operator("What is done to properties")
        if caller.account is None:
            raise NotSupportedError("To change properties, send an API key with admin: true.")
        await bodies.read(request, preparation.properties, optional=True)
        return {"success": True}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(model: str | None = None) -> Response:
        """llama-server's metrics, summed over the replicas of the model."""
        answers = await find(models, model).engine.stats()
        text = llama_metrics.render(answers.found, len(answers.missing))
        began = {"Process-Start-Time-Unix": str(int(_STARTED_S))}
        return Response(text, headers=began, media_type=CONTENT_TYPE_LATEST)
