"""llama-server's routes about slots, adapters, and which models are loaded.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from serve_app.errors import EngineUnavailableError, InvalidRequestError
from serve_app.ingress.http import request_context
from serve_app.ingress.llama_server import preparation
from serve_app.ingress.model_registry import Answers, ServedModel, find
from serve_app.ingress.workers.bodies import Bodies


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    """Add the routes."""
    _add_slots(app, models, bodies)
    _add_adapters(app, models, bodies)
    _add_loading(app, models, bodies)


def _add_slots(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.get("/slots")
    async def slots(
        response: Response, model: str | None = None, fail_on_no_slot: int = 0
    ) -> list[dict[str, Any]]:
        """The slots of all replicas of the model; what is in them, operators are told only. The header
        `x-corral-missing` names the replicas that did not answer in time."""
        answers = await slots_of(find(models, model))
        if fail_on_no_slot and all(slot["is_processing"] for slot in answers.found):
            raise EngineUnavailableError("No slot is free.")
        if answers.missing:
            response.headers["x-corral-missing"] = ", ".join(answers.missing)
        return list(answers.found)

    @app.post("/slots/{id_slot}")
    async def act_on_slot(
        request: Request,
        id_slot: int,
        action: Literal["save", "restore", "erase"],
        replica_id: str | None = None,
    ) -> dict[str, Any]:
        """Save an idle slot's cache to a file, take it back, or erase it. `replica_id` says whose, if
        there are several replicas. For operators."""
        request_context.current().check_operator("What is done to slots")
        model, filename = await bodies.read(request, preparation.slot_request, optional=True)
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


def _add_adapters(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.get("/lora-adapters")
    async def lora_adapters(model: str | None = None) -> list[dict[str, Any]]:
        """A model's LoRA adapters, each with its name as `path`, and the scale that requests have which say
        nothing: 0, unless `model` names one."""
        found = find(models, model)
        scales = {one.id: one.scale for one in found.used}
        return [
            {"id": i, "path": one.id, "scale": scales.get(one.id, 0.0)}
            for i, one in found.adapters.items()
        ]

    @app.post("/lora-adapters")
    async def change_lora_adapters(request: Request) -> dict[str, bool]:
        """Load one more adapter, or unload one. Or set scales, as at llama-server: only to 0, as each
        request says what it has. For operators."""
        request_context.current().check_operator("What is done to adapters")
        asked = await bodies.read(request, preparation.adapters)
        if asked is not None:
            engine = find(models, asked.model).engine
            if asked.load is not None:
                await engine.load_adapter(asked.load)
            if asked.unload is not None:
                await engine.unload_adapter(asked.unload)
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


def _add_loading(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    @app.post("/models/load")
    async def load_model(request: Request) -> dict[str, bool]:
        """Load a model that has `keep_alive`, and answer when it is there. For operators."""
        request_context.current().check_operator("What models are loaded")
        model_id = await bodies.read(request, preparation.named_model)
        await models[model_id].engine.load()
        return {"success": True}

    @app.post("/models/unload")
    async def unload_model(request: Request) -> dict[str, bool]:
        """Let a model that has `keep_alive` go as soon as nobody uses it. For operators."""
        request_context.current().check_operator("What models are loaded")
        model_id = await bodies.read(request, preparation.named_model)
        await models[model_id].engine.release()
        return {"success": True}
