"""OpenAI's completions, chat completions and models.

Source: OpenAI's API reference, "Completions", "Chat" and "Models".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from serve_app.ingress.generation import chat, generation
from serve_app.ingress.generation.tokenization import (
    refuse_unknown_tokens,
    sampling_of,
    tokenize_checked,
)
from serve_app.ingress.http import sse
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.openai import serving
from serve_app.ingress.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationParams,
    ModelCard,
    ModelList,
)
from serve_app.ingress.openai.serving import Answer, Choice
from serve_app.types import GenerationRequest


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the routes."""
    _add_generation(app, models)
    _add_models(app, models)


def _add_generation(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
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
        wanted = await chat.requests(model, answer_id, body, n, "messages")
        piece = model.tokenizer.piece if body.logprobs else None
        parsers = [chat.parser(model, body, request.prompt) for request in wanted]
        choices = [Choice(i, "chat", piece, parser) for i, parser in enumerate(parsers)]
        answer = Answer("chat", answer_id, model.id, choices, n, with_timings=body.timings)
        return await _respond(model, body, wanted, answer)


def _add_models(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.get("/v1/models")
    @app.get("/models")
    async def list_models() -> ModelList:
        """The models that are served here, the default first."""
        return ModelList(data=[model.card for model in models.values()])

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> ModelCard:
        """One model."""
        return find(models, model_id).card


async def _encode_texts(model: ServedModel, body: CompletionRequest) -> list[tuple[int, ...]]:
    if body.suffix:
        before, after = str(body.prompt), body.suffix
        n_chars, encode = len(before) + len(after), model.tokenizer.encode_infill
        return [await tokenize_checked(model, "prompt", n_chars, encode, before, after)]
    return [await _encode_text(model, prompt) for prompt in body.prompts]


async def _encode_text(model: ServedModel, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await tokenize_checked(model, "prompt", len(prompt), model.tokenizer.encode, prompt)
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
    events = serving.events(answer, deltas, include_usage=include_usage)
    return sse.EventStream(events, body.sse_ping_interval)
