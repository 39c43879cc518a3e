"""Anthropic's routes.

Source: Anthropic's API reference, "Messages".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from serve_app.errors import InvalidRequestError
from serve_app.ingress import anthropic_answers, chats, generation, sse
from serve_app.ingress.anthropic_answers import MessageAnswer
from serve_app.ingress.anthropic_requests import (
    CountTokensRequest,
    MessagesRequest,
)
from serve_app.ingress.protocol import ChatCompletionRequest
from serve_app.ingress.served import ServedModel, find


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the routes. Their errors have Anthropic's shape; see `serve_app.ingress.errors`."""

    @app.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest) -> Response:
        """Answer a chat, Anthropic's way; `stream` sends server-sent events."""
        model, chat = _chat(models, body)
        answer_id = f"msg_{uuid.uuid4().hex}"
        (request,) = await chats.requests(model, answer_id, chat, 1, "messages")
        parser = chats.parser(model, chat, request.prompt)
        shown = body.thinking is not None and body.thinks and body.thinking.display != "omitted"
        answer = MessageAnswer(answer_id, model.id, len(request.prompt), parser, shown)
        deltas = await generation.start(model, [request])
        if body.stream:
            return sse.response(anthropic_answers.events(answer, deltas))
        return JSONResponse(await anthropic_answers.collect(answer, deltas))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """The tokens of the prompt that a message would be answered from."""
        model, chat = _chat(models, body)
        prompt = await chats.encode_chat(model, chat)
        return {"input_tokens": len(prompt)}


def _chat(
    models: Mapping[str, ServedModel], body: CountTokensRequest
) -> tuple[ServedModel, ChatCompletionRequest]:
    """The model, and what it is asked. Raises InvalidRequestError."""
    model = find(models, body.model)
    if body.thinking is not None and body.thinking.type == "enabled" and not model.tokenizer.thinks:
        raise InvalidRequestError("This model's chat template has no thoughts.", "thinking")
    return model, body.as_chat()
