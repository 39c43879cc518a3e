"""The FastAPI application with all routes, over any engine. It knows no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app import __version__
from serve_app.apis.anthropic import routes as anthropic_routes
from serve_app.apis.anthropic import serving as anthropic_serving
from serve_app.apis.audio import preparation as audio_preparation
from serve_app.apis.audio import routes as audio_routes
from serve_app.apis.audio.hearing import Recognizer
from serve_app.apis.audio.serving import Transcriber
from serve_app.apis.batches import routes as batch_routes
from serve_app.apis.batches.executor import BatchExecutor
from serve_app.apis.embeddings import routes as embedding_routes
from serve_app.apis.llama_server import routes as llama_routes
from serve_app.apis.ollama import routes as ollama_routes
from serve_app.apis.ollama import serving as ollama_serving
from serve_app.apis.openai import routes as openai_routes
from serve_app.apis.page import broadcaster
from serve_app.apis.page.broadcaster import Broadcaster
from serve_app.apis.page.page import Page
from serve_app.apis.responses import routes as responses_routes
from serve_app.apis.responses.background import BackgroundResponses
from serve_app.apis.responses.store import ResponseStore, Store
from serve_app.base import plugins as plugin_table
from serve_app.config.schema import IngressConfig
from serve_app.server import information
from serve_app.server.access import routes as key_routes
from serve_app.server.access.api_keys import KeyAccounts
from serve_app.server.access.auth import ANSWER_HEADERS, AccessMiddleware
from serve_app.server.access.network import Cors, NetworkPolicy
from serve_app.server.access.turnstile import OpenRequests
from serve_app.server.http import errors
from serve_app.server.http.dependencies import Bodies, add_routes, worker_modules
from serve_app.server.http.description import DescribedApi
from serve_app.server.media.fetching import Fetcher
from serve_app.server.model_control import ModelControl
from serve_app.server.model_registry import ServedModel
from serve_app.server.usage import routes as usage_routes
from serve_app.server.usage.ledger import Ledger
from serve_app.server.usage.telemetry import Telemetry
from serve_app.server.usage.telemetry import provider as tracers
from serve_app.server.workers.pool import Workers

ROUTERS = (
    openai_routes.ROUTER,
    information.ROUTER,
    broadcaster.ROUTER,
    llama_routes.ROUTER,
    anthropic_routes.ROUTER,
    responses_routes.ROUTER,
    embedding_routes.ROUTER,
    ollama_routes.ROUTER,
    audio_routes.ROUTER,
    batch_routes.ROUTER,
    usage_routes.ROUTER,
    key_routes.ROUTER,
)
"""The protocols and their parts."""
WORKER_MODULES = (*worker_modules(ROUTERS), audio_preparation.__name__)
"""The modules that workers import before they are forked."""


def build_api(
    models: Mapping[str, ServedModel],
    config: IngressConfig,
    workers: Workers,
    open_requests: OpenRequests | None = None,
    store: ResponseStore | None = None,
    model_control: ModelControl | None = None,
) -> FastAPI:
    """The application that serves these models; the first is the default.

    The workers read bodies. `open_requests` counts those that are answered. `store` keeps responses;
    without it, this process alone does. Batches are worked on from the application's start on, as its
    lifespan. `model_control` adds and removes models. Raises ConfigError for a key file that cannot be
    used, and OSError for a folder.
    """
    fetch = Fetcher(config.picture_hosts).fetch if config.picture_hosts else None
    bodies = Bodies(workers, strict=config.strict, fetch=fetch)
    ledger = Ledger(config.usage_folder and config.usage_folder.expanduser(), prices=config.prices)
    accounts = KeyAccounts(config.api_key_file, ledger) if config.api_key_file else None
    telemetry = Telemetry(tracers(), answers=config.request_log, bodies=config.log_prompts)
    executor = None
    if config.batch.folder is not None:
        executor = BatchExecutor(lambda *call: app(*call), config.batch, workers, accounts)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(ledger.close)
            if recognizer is not None:
                stack.callback(recognizer.close)
            stack.push_async_callback(asyncio.to_thread, telemetry.close)
            stack.push_async_callback(app.state.responses.drain)
            if executor is not None:
                await stack.enter_async_context(executor.running())
            yield

    app = DescribedApi(
        title="Corral",
        version=__version__,
        lifespan=running,
        docs_url=None,  # the page has it; FastAPI's would load it from elsewhere
        redoc_url=None,
    )
    if open_requests is None:
        open_requests = OpenRequests(config.max_ongoing_requests)
    app.state.models, app.state.bodies = models, bodies
    app.state.has_ui = bool(config.ui)
    app.state.sse_ping_interval_s, app.state.streams = config.sse_ping_interval_s, set()
    app.state.model_control = model_control
    store = Store() if store is None else store
    app.state.responses = BackgroundResponses(
        store, open_requests, config.responses_kept_s, config.sse_ping_interval_s
    )
    app.state.batches = executor
    app.state.broadcaster = Broadcaster(models)
    recognizer: Recognizer | None = None
    if config.whisper is not None:
        recognizer = plugin_table.load_plugin("whisper").WhisperProcess(config.whisper)
    app.state.transcriber = Transcriber(models, bodies, recognizer)
    errors.install(app, anthropic_serving.ERRORS | ollama_serving.ERRORS)
    app.state.ledger, app.state.accounts = ledger, accounts
    _add_middleware(app, config, accounts, open_requests, ledger, telemetry)
    add_routes(app, ROUTERS)
    return app


def _add_middleware(
    app: FastAPI,
    config: IngressConfig,
    accounts: KeyAccounts | None,
    open_requests: OpenRequests,
    ledger: Ledger,
    telemetry: Telemetry,
) -> None:
    """The last one added is the first one asked."""
    app.add_middleware(
        AccessMiddleware,
        config=config,
        accounts=accounts,
        open_requests=open_requests,
        ledger=ledger,
        telemetry=telemetry,
    )
    if config.ui:
        app.add_middleware(Page, switch=config.ui, network=NetworkPolicy.of(config))
    app.add_middleware(HeadAsGet)
    # A page that has a key may ask from anywhere.
    origins = config.cors_origins or (["*"] if config.api_key_file else [])
    if origins:  # before that: browsers ask what they may without a key
        app.add_middleware(
            Cors,
            allow_origins=origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            allow_credentials=not config.cors_origins,
            expose_headers=ANSWER_HEADERS,
        )


class HeadAsGet:
    """A middleware that the app takes for a client which leaves once it has the headers.
    Source: RFC 9110, "HEAD"."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app's answer, or the headers of its answer to GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_headers = False

        async def send_headers(message: Message) -> None:
            nonlocal has_headers
            if not has_headers:
                has_headers = True
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        async def receive_or_leave() -> Message:
            return {"type": "http.disconnect"} if has_headers else await receive()

        await self._app({**scope, "method": "GET"}, receive_or_leave, send_headers)
