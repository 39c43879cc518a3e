"""The turns and tools of a chat as Ollama's clients send them.

Source: ollama, api/types.go, `Message` and `Tool`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from serve_app.ingress.http.request_model import RequestModel
from serve_app.prompt.conversation import Attachment, PastCall, Turn, texts_in


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

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    """The assistant's reasoning."""
    images: list[str] | None = None
    """Pictures in base64."""
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    """The function that a tool's result is of."""
    tool_call_id: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _in_any_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("content", mode="before")
    @classmethod
    def _parts_are_lines(cls, value: object) -> object:
        return "\n".join(texts_in(value)) if isinstance(value, list | dict | None) else value

    def as_turn(self) -> Turn:
        """The message in the canonical form."""
        is_assistant = self.role == "assistant"
        return Turn(
            self.role,
            parts(self.content, self.images),
            (self.thinking or "") if is_assistant else "",
            tuple(call.as_call() for call in self.tool_calls or ()) if is_assistant else (),
            self.tool_call_id or "",
            (self.tool_name or "") if self.role == "tool" else "",
        )
