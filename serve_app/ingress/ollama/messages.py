"""The turns and tools of a chat as Ollama's clients send them.

Source: ollama, api/types.go, `Message` and `Tool`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from serve_app.ingress.generation.messages import (
    AnyPart,
    ChatMessage,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    MessageToolCall,
    PicturePart,
    TextPart,
    Tool,
)
from serve_app.ingress.http.request_model import RequestModel


def content(text: str, images: Sequence[str] | None) -> str | list[AnyPart]:
    """As OpenAI has it: pictures, which are in base64, stand before the text, as at Ollama."""
    if not images:
        return text
    parts: list[AnyPart] = [PicturePart.of(f"data:;base64,{image}") for image in images]
    return [*parts, TextPart(type="text", text=text)]


class OllamaFunction(RequestModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object."""


class OllamaTool(RequestModel):
    """One of `tools`."""

    type: str = "function"
    function: OllamaFunction

    def as_tool(self) -> Tool:
        """The tool as OpenAI has it."""
        given = self.function.model_dump(exclude_none=True)
        return Tool(type="function", function=FunctionDefinition(**given))


class CalledFunction(RequestModel):
    """The function that an earlier turn called."""

    name: str
    arguments: dict[str, Any] = Field(default={})


class OllamaCall(RequestModel):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(RequestModel):
    """One turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    """The assistant's reasoning."""
    images: list[str] | None = None
    """Pictures in base64."""
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    """Which function a tool's result is of."""
    tool_call_id: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _in_any_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("content", mode="before")
    @classmethod
    def _null_is_empty(cls, value: object) -> object:
        return "" if value is None else value


def as_chat(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The turns as OpenAI has them. Raises InvalidRequestError.

    There, calls have ids, and results say whose they are. Here they may do without: a result is that of the
    first call of its function that has none yet, or of the first one at all.
    """
    turns: list[ChatMessage] = []
    waiting: list[MessageToolCall] = []
    """Calls without a result."""
    for place, message in enumerate(messages):
        if message.role == "assistant":
            waiting = _calls(message, place)
        call_id = None
        if message.role == "tool":
            call_id = message.tool_call_id or _answered(waiting, message.tool_name, place)
            waiting = [call for call in waiting if call.id != call_id]
        turns.append(
            ChatMessage(
                role=message.role,
                content=content(message.content, message.images),
                name=message.tool_name if message.role == "tool" else None,
                tool_call_id=call_id,
                tool_calls=waiting or None if message.role == "assistant" else None,
                reasoning_content=message.thinking if message.role == "assistant" else None,
            )
        )
    return turns


def _calls(message: OllamaMessage, place: int) -> list[MessageToolCall]:
    return [
        MessageToolCall(
            id=call.id or f"call_{place}_{number}",
            function=FunctionCall(
                name=call.function.name,
                arguments=json.dumps(call.function.arguments, ensure_ascii=False),
            ),
        )
        for number, call in enumerate(message.tool_calls or ())
    ]


def _answered(waiting: list[MessageToolCall], name: str | None, place: int) -> str:
    """The id of the call that a result is of."""
    of_name = (call.id for call in waiting if call.function.name == name)
    return next(of_name, waiting[0].id if waiting else f"call_{place}")
