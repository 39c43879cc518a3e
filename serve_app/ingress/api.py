"""The routes, over any engine: nothing in here knows Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from serve_app import __version__
from serve_app.errors import RequestNotFoundError
from serve_app.ingress.anthropic import routes as anthropic_routes
from serve_app.ingress.dashboard import broadcaster
from serve_app.ingress.dashboard.page import Page
from serve_app.ingress.embeddings import routes as embedding_routes
from serve_app.ingress.http import errors, request_context
from serve_app.ingress.http.auth import Access, Guard
from serve_app.ingress.http.json_body import JsonRoute
from serve_app.ingress.http.timings import explained
from serve_app.ingress.llama_server import routes as llama_routes
from serve_app.ingress.model_registry import ServedModel
from serve_app.ingress.openai import routes as openai_routes
from serve_app.ingress.openapi import spec
from serve_app.ingress.responses import routes as responses_routes


def build_api(models: Mapping[str, ServedModel], access: Access = Access()) -> FastAPI:  # noqa: B008
    """The application that serves these models; the first is the default. Raises ConfigError for a key
    file that cannot be used."""
    app = FastAPI(title="Corral", version=__version__)
    app.router.route_class = JsonRoute
    errors.install(app)
    _add_middleware(app, access)
    openai_routes.add(app, models)
    _add_information_routes(app, models)
    broadcaster.add(app, models)
    llama_routes.add(app, models)
    anthropic_routes.add(app, models)
    responses_routes.add(app, models)
    embedding_routes.add(app, models)
    spec.install(app)
    return app


def _add_middleware(app: FastAPI, access: Access) -> None:
    """The last one added is the first one asked."""
    app.add_middleware(Guard, accounts=access.accounts(), allow_anonymous=access.allow_anonymous)
    if access.ui:
        app.add_middleware(Page, switch=access.ui)
    if access.cors_origins:  # before the guard: browsers ask what they may without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )


def _add_information_routes(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        """Every replica that answers: its slots, queue and counters. `missing` names those that run and do
        not answer in time."""
        answers = await asyncio.gather(*(model.engine.stats() for model in models.values()))
        return {
            "models": [
                {
                    "id": model.id,
                    "replicas": [dataclasses.asdict(replica) for replica in of_model.found],
                    "missing": of_model.missing,
                }
                for model, of_model in zip(models.values(), answers, strict=True)
            ]
        }

    @app.get("/v1/requests/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        """What a request waited for and how long, by its answer's id or its `x-request-id`: live, or one of
        the last thousand of its replica."""
        answers = await asyncio.gather(*(m.engine.explain(request_id) for m in models.values()))
        records = [record for of_model in answers for record in of_model.found]
        missing = [replica_id for of_model in answers for replica_id in of_model.missing]
        account = request_context.current().account
        if account is not None:
            records = [record for record in records if record.client == account.key.name]
        if not records:
            unheard = f" These replicas did not answer: {', '.join(missing)}." if missing else ""
            raise RequestNotFoundError(f"No request {request_id!r} is known here.{unheard}")
        return {
            "id": request_id,
            "object": "request",
            "sequences": [explained(record) for record in records],
            "missing": missing,
        }

    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> dict[str, str]:
        """Requests are taken; they may have to wait for an engine that is still starting."""
        return {"status": "ok"}
