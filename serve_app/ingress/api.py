"""The routes, over any engine: nothing in here knows Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse

from serve_app import __version__
from serve_app.errors import InvalidRequestError, ModelNotFoundError, PromptTooLongError
from serve_app.ingress import answers, errors
from serve_app.ingress.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
    GenerationParams,
    ModelCard,
    ModelList,
)
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.prompt.tool_calls import HermesParser
from serve_app.types import GenerationRequest, ReplicaStats, TokenDelta

# Longer texts are tokenized on a thread, so that other requests' events are not held up.
_TOKENIZE_INLINE_CHARS = 4096


class EngineClient(Protocol):
    """The way to one model's engines."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta]:
        """Run a request; raises CorralError. Closing the generator ends the request."""

    async def stats(self) -> list[ReplicaStats]:
        """What each replica tells about itself."""


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """One model as the ingress knows it."""

    id: str
    n_ctx_slot: int
    tokenizer: Tokenizer
    engine: EngineClient
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def card(self) -> ModelCard:
        """Its entry in /v1/models."""
        return ModelCard(id=self.id, created=self.created, n_ctx_slot=self.n_ctx_slot)


def build_api(models: Mapping[str, ServedModel]) -> FastAPI:
    """The application that serves these models; the first is the default."""
    app = FastAPI(
        title="Corral",
        version=__version__,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    )
    errors.install(app)
    _add_generation_routes(app, models)
    _add_information_routes(app, models)
    return app


def _add_generation_routes(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest) -> Response:
        """Continue a text; `stream` sends server-sent events."""
        model = _find(models, body.model)
        prompt = await _encode_text(model, body.prompt)
        answer = answers.Answer("text", f"cmpl-{uuid.uuid4().hex}", model.id)
        return await _generate(model, body, prompt, body.max_tokens, answer, "prompt")

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest) -> Response:
        """Answer a chat through the model's own template; `stream` sends server-sent events."""
        model = _find(models, body.model)
        tools = body.tools_for_template()
        prompt = await _encode_chat(model, body, tools)
        max_tokens = body.max_completion_tokens or body.max_tokens
        parser = HermesParser() if tools else None
        answer = answers.Answer("chat", f"chatcmpl-{uuid.uuid4().hex}", model.id, parser)
        return await _generate(model, body, prompt, max_tokens, answer, "messages")


def _add_information_routes(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.get("/v1/models")
    async def list_models() -> ModelList:
        """The models that are served here, the default first."""
        return ModelList(data=[model.card for model in models.values()])

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> ModelCard:
        """One model."""
        return _find(models, model_id).card

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

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Requests are taken; they may have to wait for an engine that is still starting."""
        return {"status": "ok"}


def _find(models: Mapping[str, ServedModel], model_id: str | None) -> ServedModel:
    if model_id is None:
        return next(iter(models.values()))
    if model_id not in models:
        raise ModelNotFoundError(model_id)
    return models[model_id]


async def _encode_text(model: ServedModel, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if len(prompt) <= _TOKENIZE_INLINE_CHARS:
            return model.tokenizer.encode(prompt)
        return await asyncio.to_thread(model.tokenizer.encode, prompt)
    if max(prompt) >= model.tokenizer.n_vocab:
        raise InvalidRequestError(
            f"prompt: token ids of this model are below {model.tokenizer.n_vocab}.", "prompt"
        )
    return tuple(prompt)


async def _encode_chat(
    model: ServedModel, body: ChatCompletionRequest, tools: list[dict[str, Any]]
) -> tuple[int, ...]:
    messages = [message.for_template() for message in body.messages]
    size = sum(len(message["content"]) for message in messages) + len(str(tools))
    if size <= _TOKENIZE_INLINE_CHARS:
        return model.tokenizer.encode_chat(messages, tools)
    return await asyncio.to_thread(model.tokenizer.encode_chat, messages, tools)


async def _generate(
    model: ServedModel,
    body: GenerationParams,
    prompt: tuple[int, ...],
    max_tokens: int | None,
    answer: answers.Answer,
    prompt_field: str,
) -> Response:
    """Refuse what cannot fit, start the engine, and answer in the way the request asks for."""
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", prompt_field)
    if len(prompt) >= model.n_ctx_slot:
        raise PromptTooLongError(len(prompt), model.n_ctx_slot, prompt_field)
    if body.context_shift and max_tokens is None:
        raise InvalidRequestError(
            "'context_shift' needs 'max_tokens': the text might never end.", "context_shift"
        )
    sampling = body.sampling(max_tokens)
    if any(token not in range(model.tokenizer.n_vocab) for token, _ in sampling.logit_bias):
        raise InvalidRequestError(
            f"logit_bias: token ids of this model are below {model.tokenizer.n_vocab}.",
            "logit_bias",
        )
    deltas = model.engine.generate(
        GenerationRequest(
            answer.id,
            prompt,
            sampling,
            client=body.user or "",
            priority=body.priority,
            context_shift=body.context_shift,
            n_keep=body.n_keep,
        )
    )
    if not body.stream:
        return JSONResponse(await answers.collect(answer, deltas))
    # The status line can still say what went wrong until the first delta is here.
    first = await anext(deltas)
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return StreamingResponse(
        answers.events(answer, _chain(first, deltas), include_usage=include_usage),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _chain(first: TokenDelta, rest: AsyncGenerator[TokenDelta]) -> AsyncIterator[TokenDelta]:
    try:
        yield first
        async for delta in rest:
            yield delta
    finally:
        await rest.aclose()
