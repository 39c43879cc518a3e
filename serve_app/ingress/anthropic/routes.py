"""Anthropic's routes.

Source: Anthropic's API reference, "Messages".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from serve_app.errors import InvalidRequestError
from serve_app.ingress.anthropic import serving
from serve_app.ingress.anthropic.protocol import (
    CountTokensRequest,
    MessagesRequest,
)
from serve_app.ingress.anthropic.serving import MessageAnswer
from serve_app.ingress.generation import chat, generation
from serve_app.ingress.http import sse
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.openai.protocol import ChatCompletionRequest


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the routes. Their errors have Anthropic's shape; see `serve_app.ingress.http.errors`."""

    @app.post("/v1/messages", response_model=None)
    async def messages(body: MessagesRequest) -> Response:
        """Answer a chat, Anthropic's way; `stream` sends server-sent events."""
        model, chat_body = _chat(models, body)
        answer_id = f"msg_{uuid.uuid4().hex}"
        (request,) = await chat.requests(model, answer_id, chat_body, 1, "messages")
        parser = chat.parser(model, chat_body, request.prompt)
        shown = body.thinking is not None and body.thinks and body.thinking.display != "omitted"
        answer = MessageAnswer(answer_id, model.id, len(request.prompt), parser, shown)
        deltas = await generation.start(model, [request])
        if body.stream:
            events = serving.events(answer, deltas)
            return sse.EventStream(events, body.sse_ping_interval, serving.PING)
        return JSONResponse(await serving.collect(answer, deltas))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """The tokens of the prompt that a message would be answered from."""
        model, chat_body = _chat(models, body)
        prompt = await chat.encode_chat(model, chat_body)
        return {"input_tokens": len(prompt)}


def _chat(
    models: Mapping[str, ServedModel], body: CountTokensRequest
) -> tuple[ServedModel, ChatCompletionRequest]:
    """The model, and what it is asked. Raises InvalidRequestError."""
    model = find(models, body.model)
    if body.thinking is not None and body.thinking.type == "enabled" and not model.tokenizer.thinks:
        raise InvalidRequestError("This model's chat template has no reasoning.", "thinking")
    return model, body.as_chat()
