"""Turns bodies of Anthropic's requests into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.ingress.anthropic.protocol import CountTokensRequest, MessagesRequest
from serve_app.ingress.generation import preparation
from serve_app.ingress.generation.preparation import Chat, PromptLength
from serve_app.ingress.http.request_model import parsed
from serve_app.ingress.model_registry import Models, find


@dataclass(frozen=True, slots=True)
class Messages:
    """The prepared request for a message."""

    chat: Chat
    shows_reasoning: bool


def messages(models: Models, body: bytes) -> Messages:
    """POST /v1/messages. Raises CorralError."""
    request = parsed(MessagesRequest, body)
    chat = request.as_chat()
    model = find(models, request.model, preparation.chat_beginning(chat.conversation))
    shown = (
        request.thinking is not None and request.thinks and request.thinking.display != "omitted"
    )
    return Messages(preparation.chat(model, chat, 1, "messages"), shown)


def count_tokens(models: Models, body: bytes) -> PromptLength:
    """POST /v1/messages/count_tokens. Raises CorralError."""
    request = parsed(CountTokensRequest, body)
    chat = request.as_chat()
    model = find(models, request.model, preparation.chat_beginning(chat.conversation))
    return preparation.length(model, chat, "messages")
