"""The turns and tools of a chat as Ollama's clients send them.

Source: ollama, api/types.go, `Message` and `Tool`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field, field_validator

from serve_app.ingress.http.request_model import RequestModel
from serve_app.prompt.conversation import Attachment, PastCall, Turn, text_of


def parts(text: str, images: Sequence[str] | None) -> tuple[str | Attachment, ...]:
    """A turn's parts: pictures, which are in base64, stand before the text, as at Ollama."""
    return (*(Attachment(f"data:;base64,{image}") for image in images or ()), text)


class OllamaCalledFunction(RequestModel):
    """The function that an earlier turn called."""

    name: str = ""
    arguments: Any = None


class OllamaCall(RequestModel):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    function: OllamaCalledFunction = Field(default=OllamaCalledFunction())

    def as_call(self) -> PastCall:
        """The call in the canonical form."""
        arguments = self.function.arguments
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        return PastCall(self.function.name, text, self.id or "")


class OllamaMessage(RequestModel):
    """A message."""

    role: str
    content: str = ""
    thinking: str | None = None
    """The assistant's reasoning."""
    images: list[str] | None = None
    """Pictures in base64."""
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    """The function that a tool's result is of."""
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts_are_lines(cls, value: object) -> str:
        return text_of(value)

    def as_turn(self) -> Turn:
        """The message in the canonical form."""
        turn = Turn.of(self.role, parts(self.content, self.images), call_id=self.tool_call_id or "")
        if turn.role == "tool":
            return replace(turn, name=self.tool_name or "")
        if turn.role != "assistant":
            return turn
        calls = tuple(call.as_call() for call in self.tool_calls or ())
        return replace(turn, reasoning=self.thinking or "", calls=calls)
