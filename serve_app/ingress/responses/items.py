"""The items of a response's input: messages, calls and their outputs.

Source: OpenAI's API reference, "Responses", `input`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve_app.ingress.generation import messages
from serve_app.ingress.generation.messages import ChatMessage, FunctionCall, MessageToolCall
from serve_app.ingress.http import media
from serve_app.ingress.http.request_model import RequestModel

Json = dict[str, Any]


def _identity(kind: str) -> Json:
    return {"id": f"{kind}_{uuid.uuid4().hex}", "status": "completed"}


class Part(RequestModel):
    """A part of a message's content, or of a call's output."""

    INERT: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text"]
    text: str

    def told(self) -> Json:
        """As it is kept and given back."""
        of_answer: Json = {"annotations": [], "logprobs": []} if self.type == "output_text" else {}
        return {"type": self.type, "text": self.text, **of_answer}


class PicturePart(RequestModel):
    """A picture in a message, or in a call's output."""

    INERT: ClassVar[frozenset[str]] = frozenset({"detail"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"file_id"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": (None,)}

    type: Literal["input_image"]
    image_url: str
    """A data URL: `data:image/png;base64,…`."""

    def told(self) -> Json:
        """As it is kept and given back."""
        return {"type": self.type, "image_url": self.image_url, "detail": "auto"}


class SoundPart(messages.SoundPart):
    """A sound in a message."""

    def told(self) -> Json:
        """As it is kept and given back."""
        return self.model_dump()


def _parts(value: object) -> object:
    media.refuse(value, "input", takes={"input_image", "input_audio"})
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


AnyPart = Annotated[Part | PicturePart | SoundPart, Field(discriminator="type")]
Parts = Annotated[
    list[AnyPart], BeforeValidator(_parts, json_schema_input_type=str | list[AnyPart])
]


def _content(parts: Sequence[AnyPart]) -> list[messages.AnyPart]:
    """As the chat has it."""
    return [
        messages.TextPart(type="text", text=part.text)
        if isinstance(part, Part)
        else part
        if isinstance(part, SoundPart)
        else messages.PicturePart.of(part.image_url)
        for part in parts
    ]


class Item(RequestModel):
    """One of `input`. Clients send items of earlier answers as they got them."""

    INERT: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "namespace": (None,),
        "caller": (None, {"type": "direct"}),
    }


class MessageItem(Item):
    """A turn's text."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts

    def as_message(self) -> ChatMessage:
        """The turn as the chat has it."""
        return ChatMessage(role=self.role, content=_content(self.content))

    def told(self) -> Json:
        """As it is kept and given back."""
        content = [part.told() for part in self.content]
        return {**_identity("msg"), "type": self.type, "role": self.role, "content": content}


class FunctionCallItem(Item):
    """A call that the assistant made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def as_call(self) -> MessageToolCall:
        """The call as the chat has it."""
        function = FunctionCall(name=self.name, arguments=self.arguments)
        return MessageToolCall(id=self.call_id, function=function)

    def told(self) -> Json:
        """As it is kept and given back."""
        return {**_identity("fc"), **self.model_dump()}


class FunctionCallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts

    def as_message(self) -> ChatMessage:
        """The output as the chat has it."""
        content = _content(self.output)
        return ChatMessage(role="tool", tool_call_id=self.call_id, content=content)

    def told(self) -> Json:
        """As it is kept and given back."""
        output: Any = [part.told() for part in self.output]
        if len(self.output) == 1 and isinstance(self.output[0], Part):
            output = self.output[0].text
        given = {"type": self.type, "call_id": self.call_id, "output": output}
        return {**_identity("fco"), **given}


class ReasoningItem(BaseModel):
    """Reasoning of an earlier turn, which is dropped."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


def _items(value: object) -> object:
    """A text is short for one message of it; messages need not say that they are some."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
        for item in value
    ]


AnyItem = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem,
    Field(discriminator="type"),
]
Items = Annotated[
    list[AnyItem], BeforeValidator(_items, json_schema_input_type=str | list[AnyItem])
]


def kept(before: Sequence[Json], items: Iterable[AnyItem]) -> bytes:
    """A conversation as JSON, for `before` of the next response. Reasoning is not part of it."""
    new = [item.told() for item in items if not isinstance(item, ReasoningItem)]
    return json.dumps([*before, *new], ensure_ascii=False, separators=(",", ":")).encode()


def turns(items: Iterable[AnyItem]) -> list[ChatMessage]:
    """The items as the chat has them: an assistant's calls belong to its turn. Raises
    InvalidRequestError."""
    found: list[ChatMessage] = []
    for item in items:
        if isinstance(item, MessageItem | FunctionCallOutputItem):
            found.append(item.as_message())
        elif isinstance(item, FunctionCallItem):
            before = found.pop() if found and found[-1].role == "assistant" else None
            calls = [*((before.tool_calls if before else None) or []), item.as_call()]
            content = before.content if before else None
            found.append(ChatMessage(role="assistant", content=content, tool_calls=calls))
    return found
