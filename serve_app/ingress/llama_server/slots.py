"""llama-server's routes about slots, adapters, and which models are loaded.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response

from serve_app.errors import EngineUnavailableError, InvalidRequestError
from serve_app.ingress.http import request_context
from serve_app.ingress.http.dependencies import ModelsArgument, operators_only, prepared
from serve_app.ingress.llama_server import preparation
from serve_app.ingress.llama_server.protocol import AdapterChange
from serve_app.ingress.model_registry import Answers, ServedModel, find

ROUTER = APIRouter()
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
    body: Annotated[tuple[str, str | None], prepared(preparation.slot_request, optional=True)],
    id_slot: int,
    action: Literal["save", "restore", "erase"],
    replica_id: str | None = None,
) -> dict[str, Any]:
    """Save an idle slot's cache to a file, take it back, or erase it. `replica_id` says whose, if
    there are several replicas. For operators."""
    model, filename = body
    engine = find(models, model).engine
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
    return {
        "id_slot": id_slot,
        "filename": filename,
        **counts[action],
        "timings": timings,
    }


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
    change: Annotated[AdapterChange | None, prepared(preparation.adapters)],
) -> dict[str, bool]:
    """Load one more adapter, or unload one. Or set scales, as at llama-server: only to 0, as each
    request says what it has. For operators."""
    if change is not None:
        engine = find(models, change.model).engine
        if change.load is not None:
            await engine.load_adapter(change.load)
        if change.unload is not None:
            await engine.unload_adapter(change.unload)
    return {"success": True}


@ROUTER.post("/models/load", dependencies=[_LOADING])
async def load_model(
    models: ModelsArgument, model_id: Annotated[str, prepared(preparation.named_model)]
) -> dict[str, bool]:
    """Load a model that has `keep_alive`, and answer when it is there. For operators."""
    await models[model_id].engine.load()
    return {"success": True}


@ROUTER.post("/models/unload", dependencies=[_LOADING])
async def unload_model(
    models: ModelsArgument, model_id: Annotated[str, prepared(preparation.named_model)]
) -> dict[str, bool]:
    """Let a model that has `keep_alive` go as soon as nobody uses it. For operators."""
    await models[model_id].engine.release()
    return {"success": True}


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
