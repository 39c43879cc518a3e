"""OpenAI's responses, without a memory of them.

Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from serve_app.ingress import chats, generation, responses_answers, sse
from serve_app.ingress.responses_answers import ResponseAnswer
from serve_app.ingress.responses_requests import ResponsesRequest
from serve_app.ingress.served import ServedModel, find


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the route."""

    @app.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest) -> Response:
        """Answer a chat as a response that is not stored; `stream` sends server-sent events."""
        model = find(models, body.model)
        chat = body.as_chat()
        answer_id = f"resp_{uuid.uuid4().hex}"
        (request,) = await chats.requests(model, answer_id, chat, 1, "input")
        parser = chats.parser(model, chat, request.prompt)
        answer = ResponseAnswer(answer_id, model.id, body, request.sampling, parser)
        deltas = await generation.start(model, [request])
        if body.stream:
            return sse.response(responses_answers.events(answer, deltas))
        return JSONResponse(await responses_answers.collect(answer, deltas))
