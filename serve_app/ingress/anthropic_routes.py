"""Anthropic's routes.

Source: Anthropic's API reference, "Messages".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from serve_app.ingress import anthropic_answers, chats, generation, sse
from serve_app.ingress.anthropic_answers import MessageAnswer
from serve_app.ingress.anthropic_requests import (
    CountTokensRequest,
    MessagesRequest,
)
from serve_app.ingress.served import ServedModel, find


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the routes. Their errors have Anthropic's shape; see `serve_app.ingress.errors`."""

    @app.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest) -> Response:
        """Answer a chat, Anthropic's way; `stream` sends server-sent events."""
        model = find(models, body.model)
        chat = body.as_chat()
        answer_id = f"msg_{uuid.uuid4().hex}"
        (request,) = await chats.requests(model, answer_id, chat, 1, "messages")
        parser = chats.parser(model, chat, request.prompt)
        answer = MessageAnswer(answer_id, model.id, len(request.prompt), parser)
        deltas = await generation.start(model, [request])
        if body.stream:
            return sse.response(anthropic_answers.events(answer, deltas))
        return JSONResponse(await anthropic_answers.collect(answer, deltas))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """The tokens of the prompt that a message would be answered from."""
        model = find(models, body.model)
        chat = body.as_chat()
        prompt = await chats.encode_chat(model, chat)
        return {"input_tokens": len(prompt)}
