"""The routes of OpenAI's completions, chat completions and models.

Source: OpenAI's API reference, "Completions", "Chat" and "Models".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serve_app.ingress.generation import chat, generation
from serve_app.ingress.generation.preparation import Generation
from serve_app.ingress.http import sse
from serve_app.ingress.model_registry import ServedModel, card_of, cards, find
from serve_app.ingress.openai import preparation, serving
from serve_app.ingress.openai.answers import InputTokens, ModelCard, ModelList
from serve_app.ingress.openai.serving import Answer, Choice
from serve_app.ingress.workers.bodies import Bodies
from serve_app.types import GenerationRequest


def add(
    app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies, *, verbose: bool = False
) -> None:
    """Add the routes. With `verbose`, each request for a chat is as if it asked for that."""
    _add_generation(app, models, bodies, verbose)
    _add_models(app, models)


def _add_generation(
    app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies, verbose: bool
) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        """Continue texts; `stream` sends server-sent events."""
        asked = await bodies.read(request, preparation.completion)
        wanted, n = asked.generation, asked.generation.n
        model = find(models, wanted.model)
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        started = generation.requests(answer_id, wanted)
        piece = model.tokenizer.piece if asked.logprobs else None
        echoed = wanted.sampling.prompt_logprobs
        choices = [
            Choice(i * n + j, "text", piece, echo=echo, prompt=wanted.prompts[i] if echoed else ())
            for i, echo in enumerate(asked.echoes)
            for j in range(n)
        ]
        answer = Answer("text", answer_id, model.id, choices, n, asked.n_best, wanted.timings)
        return await _respond(model, wanted, started, answer)

    @app.post("/v1/chat/completions", response_model=None)
    @app.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """Answer a chat through the model's own template; `stream` sends server-sent events."""
        asked = await bodies.read(request, preparation.chat)
        wanted = asked.chat.generation
        model = find(models, wanted.model)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        started = generation.requests(answer_id, wanted)
        piece = model.tokenizer.piece if asked.logprobs else None
        choices = [
            Choice(
                i,
                "chat",
                piece,
                chat.parser(model, asked.chat),
                asked.chat.prefill,
                shares=wanted.sampling.post_sampling_probs,
            )
            for i in range(wanted.n)
        ]
        answer = Answer("chat", answer_id, model.id, choices, wanted.n, with_timings=wanted.timings)
        if asked.verbose or verbose:
            answer.verbose = {"prompt": model.tokenizer.decode(asked.chat.prompt, special=True)}
        return await _respond(model, wanted, started, answer)

    @app.post("/v1/chat/completions/input_tokens")
    @app.post("/chat/completions/input_tokens")
    async def input_tokens(request: Request) -> InputTokens:
        """How many tokens the prompt of such a chat has."""
        found = await bodies.read(request, preparation.input_tokens)
        return InputTokens(input_tokens=await generation.n_tokens(models, found))


def _add_models(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    @app.get("/v1/models")
    @app.get("/models")
    async def list_models() -> ModelList:
        """The models that are served here, the default first."""
        return ModelList(data=cards(models))

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> ModelCard:
        """One model."""
        return card_of(models, model_id)


async def _respond(
    model: ServedModel, wanted: Generation, started: list[GenerationRequest], answer: Answer
) -> Response:
    """Start the engine, and answer in the way the request asks for."""
    answer.return_progress = wanted.return_progress
    answer.obfuscates = wanted.obfuscates
    answer.timings_per_token = wanted.timings_per_token and wanted.timings
    deltas = await generation.start(model, started)
    if not wanted.stream:
        return JSONResponse(answer.whole(await generation.collected(deltas, len(started))))
    events = serving.events(answer, deltas, include_usage=wanted.include_usage)
    return sse.EventStream(events, wanted.sse_ping_interval)
