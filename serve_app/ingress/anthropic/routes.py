"""Anthropic's routes.

Source: Anthropic's API reference, "Messages".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serve_app.ingress.anthropic import preparation, serving
from serve_app.ingress.anthropic.serving import MessageAnswer
from serve_app.ingress.generation import chat, generation
from serve_app.ingress.http import sse
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.workers.bodies import Bodies


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    """Add the routes. Their errors have Anthropic's shape; see `serve_app.ingress.http.errors`."""

    @app.post("/v1/messages", response_model=None)
    async def messages(request: Request) -> Response:
        """Answer a chat, Anthropic's way; `stream` sends server-sent events."""
        asked = await bodies.read(request, preparation.messages)
        wanted = asked.chat.generation
        model = find(models, wanted.model)
        answer_id = f"msg_{uuid.uuid4().hex}"
        started = generation.requests(answer_id, wanted)
        parser = chat.parser(model, asked.chat)
        n_prompt = len(asked.chat.prompt)
        answer = MessageAnswer(answer_id, model.id, n_prompt, parser, asked.shows_reasoning)
        deltas = await generation.start(model, started)
        if wanted.stream:
            events = serving.events(answer, deltas)
            return sse.EventStream(events, wanted.sse_ping_interval, serving.PING)
        return JSONResponse(await serving.collect(answer, deltas))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> dict[str, int]:
        """The tokens of the prompt that a message would be answered from."""
        found = await bodies.read(request, preparation.count_tokens)
        return {"input_tokens": await generation.n_tokens(models, found)}
