"""Anthropic's routes.

Source: Anthropic's API reference, "Messages".
"""

from __future__ import annotations

import uuid
from typing import Annotated

from fastapi.responses import Response

from serve_app.apis.anthropic import preparation
from serve_app.apis.anthropic.preparation import AnthropicErrorResponse, Messages
from serve_app.apis.anthropic.serving import MessageAnswer
from serve_app.server.answering import streaming
from serve_app.server.answering.preparation import PromptLength
from serve_app.server.http.dependencies import ModelsArgument, prepare_with
from serve_app.server.http.description import CHAT, SHORT_CHAT, STREAMED, api_router
from serve_app.server.model_registry import find

ROUTER = api_router(AnthropicErrorResponse)
"""Errors have Anthropic's shape: see `serve_app.server.http.errors`."""


@ROUTER.post("/v1/messages", responses=STREAMED)
async def messages(
    models: ModelsArgument,
    message: Annotated[Messages, prepare_with(preparation.messages, example=SHORT_CHAT)],
) -> Response:
    """Answer a chat, Anthropic's way; `stream` sends server-sent events."""
    plan = message.chat.generation
    model = find(models, plan.model)
    answer_id = f"msg_{uuid.uuid4().hex}"
    parser = streaming.output_parser(model, message.chat)
    n_prompt = len(message.chat.prompt)
    answer = MessageAnswer(answer_id, model.id, n_prompt, parser, message.shows_reasoning)
    return await answer.respond(model, plan, answer_id)


@ROUTER.post("/v1/messages/count_tokens")
async def count_tokens(
    models: ModelsArgument,
    length: Annotated[PromptLength, prepare_with(preparation.count_tokens, example=CHAT)],
) -> dict[str, int]:
    """The tokens of the prompt that a message would be answered from."""
    return {"input_tokens": await streaming.n_tokens(models, length)}
