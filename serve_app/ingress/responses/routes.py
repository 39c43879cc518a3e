"""The routes of OpenAI's responses. None is stored.

Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serve_app.ingress.generation import chat, generation
from serve_app.ingress.http import sse
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.openai.protocol import InputTokens
from serve_app.ingress.responses import preparation, serving
from serve_app.ingress.responses.serving import ResponseAnswer
from serve_app.ingress.workers.bodies import Bodies


def add(app: FastAPI, models: Mapping[str, ServedModel], bodies: Bodies) -> None:
    """Add the routes."""

    @app.post("/v1/responses", response_model=None)
    @app.post("/responses", response_model=None)
    async def responses(request: Request) -> Response:
        """Answer a chat as a response that is not stored; `stream` sends server-sent events."""
        asked = await bodies.read(request, preparation.response)
        wanted = asked.chat.generation
        model = find(models, wanted.model)
        answer_id = f"resp_{uuid.uuid4().hex}"
        started = generation.requests(answer_id, wanted)
        parser = chat.parser(model, asked.chat)
        answer = ResponseAnswer(
            answer_id,
            model.id,
            asked.asked,
            parser,
            return_progress=wanted.return_progress,
            timings_per_token=wanted.timings_per_token,
        )
        deltas = await generation.start(model, started)
        if wanted.stream:
            return sse.EventStream(serving.events(answer, deltas), wanted.sse_ping_interval)
        return JSONResponse(await serving.collect(answer, deltas))

    @app.post("/v1/responses/input_tokens")
    @app.post("/responses/input_tokens")
    async def response_input_tokens(request: Request) -> InputTokens:
        """How many tokens the prompt of such a response has."""
        return InputTokens(input_tokens=await bodies.read(request, preparation.input_tokens))
