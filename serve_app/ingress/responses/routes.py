"""OpenAI's responses, without a memory of them.

Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from serve_app.ingress.generation import chat, generation
from serve_app.ingress.http import sse
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.responses import serving
from serve_app.ingress.responses.protocol import ResponsesRequest
from serve_app.ingress.responses.serving import ResponseAnswer


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the route."""

    @app.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest) -> Response:
        """Answer a chat as a response that is not stored; `stream` sends server-sent events."""
        model = find(models, body.model)
        chat_body = body.as_chat()
        answer_id = f"resp_{uuid.uuid4().hex}"
        (request,) = await chat.requests(model, answer_id, chat_body, 1, "input")
        parser = chat.parser(model, chat_body, request.prompt)
        answer = ResponseAnswer(answer_id, model.id, body, request.sampling, parser)
        deltas = await generation.start(model, [request])
        if body.stream:
            return sse.EventStream(serving.events(answer, deltas), body.sse_ping_interval)
        return JSONResponse(await serving.collect(answer, deltas))
