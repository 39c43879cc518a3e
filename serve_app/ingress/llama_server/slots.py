"""llama-server's routes about slots and adapters.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field

from serve_app.errors import EngineUnavailableError, InvalidRequestError
from serve_app.ingress.model_registry import Answers, ServedModel, find


class SlotRequest(BaseModel):
    """POST /slots/{id_slot}."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    filename: Annotated[str, Field(min_length=1)] | None = None
    """In `engine.slot_folder`; to save and to restore."""
    model: str | None = None


class LoraAdapter(BaseModel):
    """One entry of POST /lora-adapters."""

    model_config = ConfigDict(extra="forbid")

    id: int
    scale: float


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the routes."""
    _add_slots(app, models)
    _add_adapters(app)


def _add_slots(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.get("/slots")
    async def slots(
        response: Response, model: str | None = None, fail_on_no_slot: int = 0
    ) -> list[dict[str, Any]]:
        """The slots of all replicas of the model. The header `x-corral-missing` names those that did not
        answer in time."""
        answers = await slots_of(find(models, model))
        if fail_on_no_slot and all(slot["is_processing"] for slot in answers.found):
            raise EngineUnavailableError("No slot is free.")
        if answers.missing:
            response.headers["x-corral-missing"] = ", ".join(answers.missing)
        return list(answers.found)

    @app.post("/slots/{id_slot}")
    async def act_on_slot(
        id_slot: int,
        action: Literal["save", "restore", "erase"],
        body: SlotRequest | None = None,
        replica_id: str | None = None,
    ) -> dict[str, Any]:
        """Save an idle slot's cache to a file, take it back, or erase it. `replica_id` says whose, if
        there are several replicas."""
        asked = body or SlotRequest()
        engine = find(models, asked.model).engine
        if (action == "erase") is not (asked.filename is None):
            raise InvalidRequestError("'filename' goes with save and restore.", "filename")
        answers = await engine.stats()
        replicas = [*(replica.replica_id for replica in answers.found), *answers.missing]
        if replica_id not in replicas and (replica_id is not None or len(replicas) != 1):
            known = ", ".join(replicas) or "none"
            message = f"Name one of the replicas as replica_id; those are: {known}."
            raise InvalidRequestError(message, "replica_id")
        done = await engine.act_on_slot(
            replica_id or replicas[0], action, id_slot, asked.filename or ""
        )
        if action == "erase":
            return {"id_slot": id_slot, "n_erased": done.n_tokens}
        counts = {
            "save": {"n_saved": done.n_tokens, "n_written": done.n_bytes},
            "restore": {"n_restored": done.n_tokens, "n_read": done.n_bytes},
        }
        timings = {f"{action}_ms": 1000 * done.seconds}
        return {
            "id_slot": id_slot,
            "filename": asked.filename,
            **counts[action],
            "timings": timings,
        }


def _add_adapters(app: FastAPI) -> None:
    @app.get("/lora-adapters")
    async def lora_adapters() -> list[dict[str, Any]]:
        """LoRA adapters: none can be loaded."""
        return []

    @app.post("/lora-adapters")
    async def scale_lora_adapters(body: list[LoraAdapter]) -> dict[str, bool]:
        """Set their scales: there are none."""
        if body:
            raise InvalidRequestError(f"There is no LoRA adapter {body[0].id}.", "id")
        return {"success": True}


async def slots_of(model: ServedModel) -> Answers[dict[str, Any]]:
    """All slots of a model, as llama-server tells them."""
    answers = await model.engine.stats()
    slots = (
        {
            "id": slot["id"],
            "replica_id": replica.replica_id,
            "id_task": slot["request_id"],
            "n_ctx": model.n_ctx_slot,
            "speculative": False,
            "is_processing": slot["request_id"] is not None,
            "n_prompt_tokens": slot["n_prompt"],
            "n_past": slot["n_past"],
            "next_token": {"n_decoded": slot["n_generated"]},
        }
        for replica in answers.found
        for slot in replica.engine["slots"]
        if slot["state"] != "pinned"
    )
    return Answers(tuple(slots), answers.missing)
