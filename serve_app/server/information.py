"""Corral's own routes about the server: statistics, one request's record, and health."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from fastapi.responses import JSONResponse

from serve_app.base.errors import EngineUnavailableError, RequestNotFoundError
from serve_app.base.values.replicas import ReplicaStats
from serve_app.server.answering.timings import explain_record
from serve_app.server.http import request_context
from serve_app.server.http.dependencies import ModelsArgument
from serve_app.server.http.description import api_router
from serve_app.server.http.errors import retry_headers
from serve_app.server.model_registry import ServedModel, usable

ROUTER = api_router()


@ROUTER.get("/v1/stats")
async def stats(models: ModelsArgument) -> dict[str, Any]:
    """Every replica that answers of the models that you may use: its slots, queue and counters. `missing`
    names those that run and do not answer in time; `fetching` says how far those are that download their
    model. Only operators get the contents of slots."""
    models = usable(models)
    shown = dataclasses.asdict if request_context.current().is_operator else _without_requests
    answers, fetching = await asyncio.gather(
        asyncio.gather(*(model.engine.stats() for model in models.values())),
        asyncio.gather(*(model.engine.fetching() for model in models.values())),
    )
    return {
        "models": [
            {
                "id": model.id,
                "replicas": [shown(replica) for replica in of_model.found],
                "missing": of_model.missing,
                "fetching": [dataclasses.asdict(replica) for replica in coming],
            }
            for model, of_model, coming in zip(models.values(), answers, fetching, strict=True)
        ]
    }


@ROUTER.get("/v1/requests/{request_id}")
async def explain(models: ModelsArgument, request_id: str) -> dict[str, Any]:
    """The waits of a request, with reasons and times, by its answer's id or its `x-request-id`. The request
    is live, or among its replica's last thousand. With API keys, one's own only, but for operators."""
    asked = usable(models).values()
    answers = await asyncio.gather(*(model.engine.explain(request_id) for model in asked))
    records = [record for of_model in answers for record in of_model.found]
    missing = [replica_id for of_model in answers for replica_id in of_model.missing]
    caller = request_context.current()
    if caller.account is not None and not caller.is_operator:
        records = [record for record in records if record.client == caller.account.key.name]
    if not records:
        unheard = f" These replicas did not answer: {', '.join(missing)}." if missing else ""
        raise RequestNotFoundError(f"No request {request_id!r} is known here.{unheard}")
    return {
        "id": request_id,
        "object": "request",
        "sequences": [explain_record(record) for record in records],
        "missing": missing,
    }


@ROUTER.get("/health", openapi_extra={"security": []})
@ROUTER.get("/v1/health", openapi_extra={"security": []})
async def health(models: ModelsArgument) -> JSONResponse:
    """200 if requests are answered now; 503 until every model can answer that does not wait for requests.
    Models that are left out do not count as long as another one answers."""
    unknown = [model for model in models.values() if _is_coming(model)]
    await asyncio.gather(*(model.engine.stats() for model in unknown))  # Serve tells who has asked
    if not any(map(_is_coming, models.values())):
        if any(map(_can_answer, models.values())):
            return JSONResponse({"status": "ok"})
        problems = [model.problem or str(model.engine.failure) for model in models.values()]
        return _unavailable("; ".join(problems))
    return _unavailable("Loading model")


@ROUTER.get("/livez", openapi_extra={"security": []})
@ROUTER.get("/health/live", openapi_extra={"security": []})
async def live() -> dict[str, str]:
    """200 as long as the server runs, whatever its models do: a reason to start it again is no answer."""
    return {"status": "ok"}


def _can_answer(model: ServedModel) -> bool:
    return not model.problem and (model.engine.is_loaded or model.waits_for_requests)


def _is_coming(model: ServedModel) -> bool:
    return not (_can_answer(model) or model.problem or model.engine.failure)


def _unavailable(message: str) -> JSONResponse:
    """The answer of a server that is not ready. Source: llama-server's README, "GET /health"."""
    error = {"code": 503, "message": message, "type": "unavailable_error"}
    return JSONResponse({"error": error}, 503, retry_headers(EngineUnavailableError(message)))


def _without_requests(replica: ReplicaStats) -> dict[str, Any]:
    fields = dataclasses.asdict(replica)
    slots = [{"id": slot["id"], "state": slot["state"]} for slot in fields["engine"]["slots"]]
    return fields | {"engine": fields["engine"] | {"slots": slots}}
