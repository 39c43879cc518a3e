"""The FastAPI application with all routes, over any engine. It knows no Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from serve_app import __version__
from serve_app.errors import RequestNotFoundError
from serve_app.ingress.anthropic import routes as anthropic_routes
from serve_app.ingress.batch import routes as batch_routes
from serve_app.ingress.batch.books import Books
from serve_app.ingress.batch.runner import Runner
from serve_app.ingress.batch.service import BatchOptions, Service
from serve_app.ingress.dashboard import broadcaster
from serve_app.ingress.dashboard.page import Page
from serve_app.ingress.embeddings import routes as embedding_routes
from serve_app.ingress.http import errors, request_context
from serve_app.ingress.http.api_keys import Accounts
from serve_app.ingress.http.auth import IGNORED, Access, AccessMiddleware
from serve_app.ingress.http.cors import Cors
from serve_app.ingress.http.limits.open_requests import OpenRequests
from serve_app.ingress.http.timings import explained
from serve_app.ingress.llama_server import routes as llama_routes
from serve_app.ingress.model_registry import ServedModel
from serve_app.ingress.ollama import routes as ollama_routes
from serve_app.ingress.openai import routes as openai_routes
from serve_app.ingress.openapi import spec
from serve_app.ingress.responses import routes as responses_routes
from serve_app.ingress.responses.runs import Runs
from serve_app.ingress.responses.store import Bounds, Store
from serve_app.ingress.versions import routes as version_routes
from serve_app.ingress.versions.control import Versions
from serve_app.ingress.workers.bodies import Bodies
from serve_app.ingress.workers.fetching import Fetcher, FetchingWorkers
from serve_app.ingress.workers.in_process import InProcess
from serve_app.ingress.workers.pool import Workers
from serve_app.types import ReplicaStats

PREPARATIONS = (
    *(
        f"serve_app.ingress.{protocol}.preparation"
        for protocol in (
            "anthropic",
            "batch",
            "embeddings",
            "llama_server",
            "ollama",
            "openai",
            "responses",
            "versions",
        )
    ),
    "serve_app.ingress.embeddings.serving",
    "serve_app.ingress.ollama.catalogue",
    "serve_app.ingress.ollama.embeddings",
)
"""The modules whose functions workers run."""


def build_api(
    models: Mapping[str, ServedModel],
    access: Access = Access(),  # noqa: B008
    workers: Workers | None = None,
    sse_ping_interval_s: float = 0.0,
    open_requests: OpenRequests | None = None,
    runs: Runs | None = None,
    batches: BatchOptions | None = None,
    versions: Versions | None = None,
) -> FastAPI:
    """The application that serves these models; the first is the default.

    The workers read bodies; without them, this process does. `sse_ping_interval_s` counts for streams whose
    requests do not say otherwise; see EventStream. `open_requests` counts those that are answered. `runs`
    makes responses that are kept; without it, this process alone keeps some. Without `batches` there are
    none; they are worked on from the application's start on, as its lifespan. `versions` changes the
    weights of models that have several. Raises ConfigError for a key file that cannot be used, and OSError
    for a folder.
    """
    workers = workers or InProcess(models)
    if access.picture_hosts:
        workers = FetchingWorkers(workers, Fetcher(access.picture_hosts))
    bodies = Bodies(workers, strict=access.strict)
    accounts = access.accounts()
    books = None if batches is None else Books(batches.folder, batches.limits)
    runner = None
    if books is not None and batches is not None:
        runner = Runner(
            lambda *call: app(*call),
            books,
            accounts,
            batches.max_concurrency,
            batches.lease_s,
        )
    app = FastAPI(
        title="Corral", version=__version__, lifespan=None if runner is None else runner.running
    )
    app.state.sse_ping_interval_s = sse_ping_interval_s
    app.state.has_ui = bool(access.ui)
    errors.install(app)
    if open_requests is None:
        open_requests = OpenRequests(access.max_requests)
    if runs is None:
        runs = Runs(models, Store(Bounds()), open_requests)
    _add_middleware(app, access, accounts, open_requests)
    openai_routes.add(app, models, bodies, verbose=access.verbose)
    _add_information_routes(app, models)
    broadcaster.add(app, models, takes_batches=batches is not None)
    llama_routes.add(app, models, bodies)
    version_routes.add(app, models, bodies, versions)
    anthropic_routes.add(app, models, bodies)
    responses_routes.add(app, models, bodies, runs)
    embedding_routes.add(app, models, bodies)
    ollama_routes.add(app, models, bodies)
    batch_routes.add(app, bodies, Service(books, runner))
    spec.install(app)
    return app


def _add_middleware(
    app: FastAPI, access: Access, accounts: Accounts | None, open_requests: OpenRequests
) -> None:
    """The last one added is the first one asked."""
    app.add_middleware(
        AccessMiddleware, access=access, accounts=accounts, open_requests=open_requests
    )
    if access.ui:
        app.add_middleware(Page, switch=access.ui, network=access.network)
    # A page that has a key may ask from anywhere.
    origins = access.cors_origins or (("*",) if access.api_key_file else ())
    if origins:  # before that: browsers ask what they may without a key
        app.add_middleware(
            Cors,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            allow_credentials=not access.cors_origins,
            expose_headers=["x-request-id", "retry-after", IGNORED],
        )


def _add_information_routes(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        """Every replica that answers: its slots, queue and counters. `missing` names those that run
        and do not answer in time; `fetching` says how far those are that download their model. Only
        operators get the contents of slots."""
        told = dataclasses.asdict if request_context.current().is_operator else _told_to_all
        answers, fetching = await asyncio.gather(
            asyncio.gather(*(model.engine.stats() for model in models.values())),
            asyncio.gather(*(model.engine.fetching() for model in models.values())),
        )
        return {
            "models": [
                {
                    "id": model.id,
                    "version": None if model.version is None else dataclasses.asdict(model.version),
                    "replicas": [told(replica) for replica in of_model.found],
                    "missing": of_model.missing,
                    "fetching": [dataclasses.asdict(replica) for replica in coming],
                }
                for model, of_model, coming in zip(models.values(), answers, fetching, strict=True)
            ]
        }

    @app.get("/v1/requests/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        """The waits of a request, with reasons and times, by its answer's id or its `x-request-id`:
        live, or one of the last thousand of its replica. With API keys, one's own only, but for
        operators."""
        answers = await asyncio.gather(*(m.engine.explain(request_id) for m in models.values()))
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
            "sequences": [explained(record) for record in records],
            "missing": missing,
        }

    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> dict[str, str]:
        """Requests are taken; they may have to wait for an engine that is still starting."""
        return {"status": "ok"}


def _told_to_all(replica: ReplicaStats) -> dict[str, Any]:
    """A replica's statistics, without single requests."""
    told = dataclasses.asdict(replica)
    slots = [{"id": slot["id"], "state": slot["state"]} for slot in told["engine"]["slots"]]
    return told | {"engine": told["engine"] | {"slots": slots}}
