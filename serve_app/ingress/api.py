"""The routes, over any engine: nothing in here knows Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response

from serve_app import __version__
from serve_app.errors import RequestNotFoundError
from serve_app.ingress import (
    answers,
    anthropic_routes,
    callers,
    chats,
    embedding_routes,
    errors,
    generation,
    llama_routes,
    openapi,
    responses_routes,
    sse,
    watch,
)
from serve_app.ingress.answers import Answer, Choice
from serve_app.ingress.encoding import encoded, refuse_unknown_tokens, sampling_of
from serve_app.ingress.guard import Access, Guard
from serve_app.ingress.json_body import JsonRoute
from serve_app.ingress.page import Page
from serve_app.ingress.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationParams,
    ModelCard,
    ModelList,
)
from serve_app.ingress.served import ServedModel, find
from serve_app.ingress.timings import explained
from serve_app.types import GenerationRequest


def build_api(models: Mapping[str, ServedModel], access: Access = Access()) -> FastAPI:  # noqa: B008
    """The application that serves these models; the first is the default. Raises ConfigError for a key
    file that cannot be used."""
    app = FastAPI(title="Corral", version=__version__)
    app.router.route_class = JsonRoute
    errors.install(app)
    _add_middleware(app, access)
    _add_generation_routes(app, models)
    _add_information_routes(app, models)
    watch.add(app, models)
    llama_routes.add(app, models)
    anthropic_routes.add(app, models)
    responses_routes.add(app, models)
    embedding_routes.add(app, models)
    openapi.install(app)
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


def _add_generation_routes(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest) -> Response:
        """Continue texts; `stream` sends server-sent events."""
        model = find(models, body.model)
        sampling = await sampling_of(body, lambda: body.sampling(body.max_tokens))
        prompts = await _encode_texts(model, body)
        n = body.best_of or body.n or 1
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        wanted = generation.requests(model, answer_id, prompts, n, body, sampling, "prompt")
        echoes = _echoes(model, body) if body.echo else [""] * len(prompts)
        piece = None if body.logprobs is None else model.tokenizer.piece
        echoed = sampling.prompt_logprobs
        choices = [
            Choice(i * n + j, "text", piece, echo=echo, prompt=prompts[i] if echoed else ())
            for i, echo in enumerate(echoes)
            for j in range(n)
        ]
        n_best = body.n or 1 if body.best_of else None
        answer = Answer("text", answer_id, model.id, choices, n, n_best, body.timings)
        return await _respond(model, body, wanted, answer)

    @app.post("/v1/chat/completions", response_model=None)
    @app.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest) -> Response:
        """Answer a chat through the model's own template; `stream` sends server-sent events."""
        model = find(models, body.model)
        n = body.n or 1
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        wanted = await chats.requests(model, answer_id, body, n, "messages")
        piece = model.tokenizer.piece if body.logprobs else None
        parsers = [chats.parser(model, body, request.prompt) for request in wanted]
        choices = [Choice(i, "chat", piece, parser) for i, parser in enumerate(parsers)]
        answer = Answer("chat", answer_id, model.id, choices, n, with_timings=body.timings)
        return await _respond(model, body, wanted, answer)


def _add_information_routes(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.get("/v1/models")
    @app.get("/models")
    async def list_models() -> ModelList:
        """The models that are served here, the default first."""
        return ModelList(data=[model.card for model in models.values()])

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> ModelCard:
        """One model."""
        return find(models, model_id).card

    @app.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        """Every replica that answers: its slots, queue and counters."""
        replicas = await asyncio.gather(*(model.engine.stats() for model in models.values()))
        return {
            "models": [
                {"id": model.id, "replicas": [dataclasses.asdict(replica) for replica in of_model]}
                for model, of_model in zip(models.values(), replicas, strict=True)
            ]
        }

    @app.get("/v1/requests/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        """What a request waited for and how long, by its answer's id or its `x-request-id`: live, or one of
        the last thousand of its replica."""
        found = await asyncio.gather(*(m.engine.explain(request_id) for m in models.values()))
        records = [record for of_model in found for record in of_model]
        account = callers.current().account
        if account is not None:
            records = [record for record in records if record.client == account.key.name]
        if not records:
            raise RequestNotFoundError(f"No request {request_id!r} is known here.")
        return {
            "id": request_id,
            "object": "request",
            "sequences": [explained(record) for record in records],
        }

    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> dict[str, str]:
        """Requests are taken; they may have to wait for an engine that is still starting."""
        return {"status": "ok"}


async def _encode_texts(model: ServedModel, body: CompletionRequest) -> list[tuple[int, ...]]:
    if body.suffix:
        before, after = str(body.prompt), body.suffix
        n_chars, encode = len(before) + len(after), model.tokenizer.encode_infill
        return [await encoded(model, "prompt", n_chars, encode, before, after)]
    return [await _encode_text(model, prompt) for prompt in body.prompts]


async def _encode_text(model: ServedModel, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await encoded(model, "prompt", len(prompt), model.tokenizer.encode, prompt)
    refuse_unknown_tokens(model, "prompt", prompt)
    return tuple(prompt)


def _echoes(model: ServedModel, body: CompletionRequest) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
        for prompt in body.prompts
    ]


async def _respond(
    model: ServedModel, body: GenerationParams, wanted: list[GenerationRequest], answer: Answer
) -> Response:
    """Start the engine, and answer in the way the request asks for."""
    deltas = await generation.start(model, wanted)
    if not body.stream:
        return JSONResponse(answer.whole(await generation.collected(deltas, len(wanted))))
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return sse.response(answers.events(answer, deltas, include_usage=include_usage))
