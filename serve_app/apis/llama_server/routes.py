"""llama-server's own routes, under its names.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Depends, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from serve_app.apis.llama_server import metrics as llama_metrics
from serve_app.apis.llama_server import preparation, serving
from serve_app.apis.llama_server.preparation import PreparedLlamaCompletion
from serve_app.apis.llama_server.protocol import AdapterChange, LoraAdapter, SlotRequest
from serve_app.apis.llama_server.serving import LlamaAnswer, LlamaChoice
from serve_app.base.errors import EngineUnavailableError, InvalidRequestError, NotSupportedError
from serve_app.base.metrics import exposition
from serve_app.base.sampling import SamplingParams
from serve_app.server.answering.answers import EventAnswer
from serve_app.server.answering.prompts import MEDIA_MARKER
from serve_app.server.answering.timings import BUILD
from serve_app.server.http import request_context
from serve_app.server.http.dependencies import (
    ModelsArgument,
    bytes_response,
    operators_only,
    prepare_with,
)
from serve_app.server.http.description import CHAT, STREAMED, api_router
from serve_app.server.http.sse import EventStream
from serve_app.server.model_control import ModelControl, ModelControlArgument
from serve_app.server.model_registry import Answers, ServedModel, find

ROUTER = api_router()
_LOADING = operators_only("What models are loaded")


@ROUTER.get("/slots")
async def slots(
    response: Response, models: ModelsArgument, model: str | None = None, fail_on_no_slot: int = 0
) -> list[dict[str, Any]]:
    """The slots of all replicas of the model; what is in them, operators are told only. The header
    `x-corral-missing` names the replicas that did not answer in time."""
    answers = await slots_of(find(models, model))
    if fail_on_no_slot and all(slot["is_processing"] for slot in answers.found):
        raise EngineUnavailableError("No slot is free.")
    if answers.missing:
        response.headers["x-corral-missing"] = ", ".join(answers.missing)
    return list(answers.found)


@ROUTER.post("/slots/{id_slot}", dependencies=[operators_only("What is done to slots")])
async def act_on_slot(
    models: ModelsArgument,
    body: Annotated[
        SlotRequest, prepare_with(preparation.slot_request, optional=True, kind=SlotRequest)
    ],
    id_slot: int,
    action: Literal["save", "restore", "erase"],
    replica_id: str | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Save an idle slot's cache to a file, take it back, or erase it. The query or the body names the
    model. `replica_id` says whose slot, if there are several replicas. For operators."""
    engine, filename = _find_either(models, model, body.model).engine, body.filename
    if (action == "erase") is not (filename is None):
        raise InvalidRequestError("'filename' needs the action save or restore.", "filename")
    answers = await engine.stats()
    replicas = [*(replica.replica_id for replica in answers.found), *answers.missing]
    if replica_id not in replicas and (replica_id is not None or len(replicas) != 1):
        known = ", ".join(replicas) or "none"
        message = f"Name one of the replicas as replica_id; those are: {known}."
        raise InvalidRequestError(message, "replica_id")
    done = await engine.act_on_slot(replica_id or replicas[0], action, id_slot, filename or "")
    if action == "erase":
        return {"id_slot": id_slot, "n_erased": done.n_tokens}
    counts = {
        "save": {"n_saved": done.n_tokens, "n_written": done.n_bytes},
        "restore": {"n_restored": done.n_tokens, "n_read": done.n_bytes},
    }
    timings = {f"{action}_ms": 1000 * done.seconds}
    return {"id_slot": id_slot, "filename": filename, **counts[action], "timings": timings}


def _find_either(
    models: Mapping[str, ServedModel], in_query: str | None, in_body: str | None
) -> ServedModel:
    """The model that the query or the body names. Raises InvalidRequestError if they name two models."""
    model = find(models, in_body if in_query is None else in_query)
    if in_query is not None and in_body is not None and find(models, in_body).id != model.id:
        raise InvalidRequestError("The query and the body name different models.", "model")
    return model


@ROUTER.get("/lora-adapters")
async def lora_adapters(models: ModelsArgument, model: str | None = None) -> list[dict[str, Any]]:
    """A model's LoRA adapters, each with its name as `path`, and the scale that requests have which say
    nothing: 0, unless `model` names one."""
    served = find(models, model)
    scales = {adapter.id: adapter.scale for adapter in served.used}
    return [
        {"id": i, "path": adapter.id, "scale": scales.get(adapter.id, 0.0)}
        for i, adapter in served.adapters.items()
    ]


@ROUTER.post("/lora-adapters", dependencies=[operators_only("What is done to adapters")])
async def change_lora_adapters(
    models: ModelsArgument,
    change: Annotated[
        tuple[AdapterChange | None, tuple[LoraAdapter, ...]],
        prepare_with(preparation.adapters, kind=AdapterChange | list[LoraAdapter]),
    ],
    model: str | None = None,
) -> dict[str, bool]:
    """Load one more adapter, or unload one. Or set scales, as at llama-server: only to 0, as each
    request says what it has. The query or the body names the model. For operators."""
    load_or_unload, scales = change
    name = None if load_or_unload is None else load_or_unload.model
    served = _find_either(models, model, name)
    if load_or_unload is not None and load_or_unload.load is not None:
        await served.engine.load_adapter(load_or_unload.load)
    if load_or_unload is not None and load_or_unload.unload is not None:
        await served.engine.unload_adapter(load_or_unload.unload)
    for adapter in scales:
        if adapter.id not in served.adapters:
            raise InvalidRequestError(f"There is no LoRA adapter {adapter.id}.", "id")
        if adapter.scale != 0:  # what requests have that say nothing stays while others run
            raise InvalidRequestError(
                "Each request sets its own scales, with 'lora' or with the adapter's name in 'model'.",
                "scale",
            )
    return {"success": True}


@ROUTER.post("/models/load", dependencies=[_LOADING])
async def load_model(
    models: ModelsArgument, name: Annotated[str, prepare_with(preparation.named_model)]
) -> dict[str, bool]:
    """Load a model that has `keep_alive`, and answer when it is there. For operators."""
    await find(models, name).engine.load()
    return {"success": True}


@ROUTER.post("/models/unload", dependencies=[_LOADING])
async def unload_model(
    request: Request,
    models: ModelsArgument,
    name: Annotated[str, prepare_with(preparation.named_model)],
) -> dict[str, bool]:
    """Let a model that has `keep_alive` go as soon as nobody uses it, or end its download. For
    operators."""
    control: ModelControl | None = request.app.state.model_control
    if control is None or not control.cancel(name):
        await find(models, name).engine.release()
    return {"success": True}


@ROUTER.post("/models", dependencies=[_LOADING])
async def download_model(
    control: ModelControlArgument, name: Annotated[str, prepare_with(preparation.named_model)]
) -> dict[str, bool]:
    """Begin to download a model of a hub, which is served then. For operators."""
    control.pull_later(name)
    return {"success": True}


@ROUTER.delete("/models", dependencies=[_LOADING])
async def delete_model(control: ModelControlArgument, model: str) -> dict[str, bool]:
    """Serve a model no more that was added. For operators."""
    await control.delete(model)
    return {"success": True}


@ROUTER.get("/models/sse", include_in_schema=False, dependencies=[_LOADING])
async def model_events(control: ModelControlArgument) -> Response:
    """The progress of downloads, and models that come and go, as server-sent events. For operators."""
    answer = EventAnswer()
    return EventStream(answer.stream(control.events(), lambda event: [event]), answer)


async def slots_of(model: ServedModel) -> Answers[dict[str, Any]]:
    """All slots of a model, as llama-server tells them; what is in them, operators are told only."""
    is_operator = request_context.current().is_operator
    answers = await model.engine.stats()
    slots = (
        {
            "id": slot["id"],
            "replica_id": replica.replica_id,
            "n_ctx": model.n_ctx_slot,
            "speculative": False,
            "is_processing": slot["request_id"] is not None,
        }
        | (_content(slot) if is_operator else {})
        for replica in answers.found
        for slot in replica.engine["slots"]
        if slot["state"] != "pinned"
    )
    return Answers(tuple(slots), answers.missing)


def _content(slot: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id_task": slot["request_id"],
        "n_prompt_tokens": slot["n_prompt"],
        "n_past": slot["n_past"],
        "next_token": [{"n_remain": -1, "n_decoded": slot["n_generated"]}],
    }


_STARTED_S = time.time()


@ROUTER.post("/completion", responses=STREAMED)
@ROUTER.post("/completions", responses=STREAMED)
async def completion(
    models: ModelsArgument,
    body: Annotated[
        PreparedLlamaCompletion,
        prepare_with(
            preparation.llama_completion,
            example={"prompt": "The capital of Portugal is", "n_predict": 8},
        ),
    ],
) -> Response:
    """Continue texts, llama-server's way."""
    return await _respond(models, body)


@ROUTER.post("/infill", responses=STREAMED)
async def infill(
    models: ModelsArgument,
    body: Annotated[
        PreparedLlamaCompletion,
        prepare_with(
            preparation.infill,
            example={"input_prefix": "def one():\n", "input_suffix": "\n", "n_predict": 8},
        ),
    ],
) -> Response:
    """Fill in what is between two texts, for models with tokens for that."""
    return await _respond(models, body)


async def _respond(models: Mapping[str, ServedModel], body: PreparedLlamaCompletion) -> Response:
    plan = body.generation
    model = find(models, plan.model)
    choices = [LlamaChoice(i, body, model) for i in range(plan.n_answers)]
    answer = LlamaAnswer(choices, body.is_batch)
    return await answer.respond(model, plan, f"cmpl-{uuid.uuid4().hex}")


@ROUTER.post("/tokenize")
async def tokenize(
    answer: Annotated[
        bytes,
        prepare_with(preparation.tokenize, example={"content": "A fox.", "with_pieces": True}),
    ],
) -> Response:
    """The tokens of a text, or of a chat, as llama-server or vLLM tells them."""
    return bytes_response(answer)


@ROUTER.post("/detokenize")
async def detokenize(
    answer: Annotated[bytes, prepare_with(preparation.detokenize, example={"tokens": [65, 66]})],
) -> Response:
    """The text of tokens."""
    return bytes_response(answer)


@ROUTER.get("/tokenizer_info")
async def tokenizer_info(models: ModelsArgument, model: str | None = None) -> dict[str, Any]:
    """A tokenizer's properties, as vLLM tells them by the names of transformers."""
    served = find(models, model)
    tokenizer = served.tokenizer
    template = tokenizer.chat_template
    return {
        "tokenizer_class": tokenizer.model.metadata().get("tokenizer.ggml.model", "unknown"),
        "bos_token": tokenizer.bos if tokenizer.encode("") else None,
        "eos_token": tokenizer.eos or None,
        "pad_token": None,
        "chat_template": template if "{" in template else None,  # or a name that llama.cpp knows
        "model_max_length": served.n_ctx_slot,
    }


@ROUTER.post("/apply-template")
async def apply_template(
    answer: Annotated[bytes, prepare_with(preparation.apply_template, example=CHAT)],
) -> Response:
    """A chat as the text that the model gets."""
    return bytes_response(answer)


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
        "model_ftype": served.tokenizer.model.file_type,
        "model_path": path_of(served.tokenizer.model.path),
        "chat_template": served.tokenizer.chat_template or "",
        "chat_template_caps": served.tokenizer.template_caps.report(),
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
    _: Annotated[None, prepare_with(preparation.properties, optional=True)],
) -> dict[str, bool]:
    """Change properties, for keys with `admin`: as at llama-server, there are none yet that can be, so
    what is sent is named as ignored."""
    return {"success": True}


@ROUTER.get("/metrics", response_class=PlainTextResponse)
async def metrics(models: ModelsArgument, model: str | None = None) -> Response:
    """llama-server's metrics and vLLM's, summed over the replicas of the model. A server without Ray has
    Corral's own behind them."""
    served = find(models, model)
    answers = await served.engine.stats()
    own = llama_metrics.visible(await asyncio.to_thread(exposition))
    text = llama_metrics.render_as_llama_server(answers.found, len(answers.missing))
    text += llama_metrics.render_as_vllm(served.id, answers.found, own) + own
    began = {"Process-Start-Time-Unix": str(int(_STARTED_S))}
    return Response(text, headers=began, media_type=CONTENT_TYPE_LATEST)
