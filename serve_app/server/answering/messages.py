"""The turns of a chat as OpenAI's clients send them.

Source: OpenAI's API reference, "Chat".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from serve_app.prompt.conversation import (
    Attachment,
    Conversation,
    PastCall,
    Turn,
    json_text,
    text_of,
)
from serve_app.server.answering.openai_tools import CustomTool, plain_choice, with_custom_tools
from serve_app.server.answering.requests import ChatRequest
from serve_app.server.answering.tools import Tool, refuse_media
from serve_app.server.http.request_model import AnyMember, Foreign, RequestModel, known_kind


class TextPart(RequestModel):
    """A part of a message's content."""

    INERT: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str = ""


class ImageUrl(RequestModel):
    """The address of a picture."""

    INERT: ClassVar[frozenset[str]] = frozenset({"detail"})

    url: str
    """A data URL: `data:image/png;base64,…`."""


class PicturePart(RequestModel):
    """A picture in a user's message."""

    INERT: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["image_url"]
    image_url: ImageUrl

    @field_validator("image_url", mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @property
    def url(self) -> str:
        return self.image_url.url

    @classmethod
    def of(cls, url: str) -> PicturePart:
        return cls(type="image_url", image_url=ImageUrl(url=url))


class InputAudio(RequestModel):
    """A sound."""

    data: Annotated[str, Field(min_length=1)]
    """A file in base64, or a data URL: `data:audio/wav;base64,…`."""
    format: Literal["wav", "mp3", "flac"] = "wav"
    """The kind of the file, which the file itself tells, too."""


class SoundPart(RequestModel):
    """A sound in a user's message."""

    INERT: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})

    type: Literal["input_audio"]
    input_audio: InputAudio

    @property
    def url(self) -> str:
        data = self.input_audio.data
        is_url = data[:5].lower() == "data:"
        return data if is_url else f"data:audio/{self.input_audio.format};base64,{data}"


AnyPart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[PicturePart, Tag("image_url")]
    | Annotated[SoundPart, Tag("input_audio")]
    | Annotated[Foreign, Tag("foreign")],
    Discriminator(known_kind("text", "image_url", "input_audio")),
    AnyMember,
]
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of parts that are texts, and the field that has each."""


def _readable(content: object) -> object:
    """Content as a text or a list of parts, whichever of the many forms a client knows."""
    if content is None or isinstance(content, str):
        return content
    content = content if isinstance(content, list) else [content]
    parts = [_normalise_part(part) for part in content if part is not None]
    refuse_media(parts, "messages", takes={"image_url", "input_audio"})
    return parts


def _normalise_part(part: object) -> object:
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        return {"type": "text", "text": text_of(part)}
    if kind in _TEXTS:
        return {"type": "text", "text": text_of(part.get(_TEXTS[kind]))}
    return part


class FunctionCall(RequestModel):
    """The function and the arguments of an earlier call."""

    name: str = ""
    arguments: str = ""
    """History, which need not be JSON."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return json_text(value)


class MessageToolCall(BaseModel):
    """A call that the assistant made in an earlier turn."""

    model_config = ConfigDict(extra="ignore")  # the openai package echoes a stream's `index`

    id: str | None = None
    type: str | None = None
    function: FunctionCall = Field(default=FunctionCall())

    @model_validator(mode="before")
    @classmethod
    def _custom_is_a_function(cls, call: Any) -> Any:
        custom = call.get("custom") if isinstance(call, dict) else None
        if not isinstance(custom, dict):
            return call
        arguments = {"input": custom.get("input", "")}
        return call | {"function": {"name": custom.get("name"), "arguments": arguments}}


class ChatMessage(RequestModel):
    """A message of a chat."""

    # The openai package echoes an assistant's turn with all of its fields, empty ones too.
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"annotations": (None, []), "audio": (None,)}

    role: Annotated[str, Field(min_length=1)]
    """`system`, `developer`, `user`, `assistant`, `tool` or `function`. Other roles are the user's, and
    named in the prompt."""
    content: str | list[AnyPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None
    """The older form of `tool_calls`."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""

    @field_validator("content", mode="before", json_schema_input_type=str | list[AnyPart] | None)
    @classmethod
    def _in_any_form(cls, value: object) -> object:
        return _readable(value)

    def as_turn(self) -> Turn:
        """The message in the canonical form."""
        content = self.content or self.refusal or ""
        parts = [content] if isinstance(content, str) else map(_canonical_part, content)
        turn = Turn.of(
            self.role,
            tuple(part for part in parts if part),
            call_id=self.tool_call_id or "",
            name=self.name or "",
        )
        if turn.role != "assistant":
            return turn
        calls = [(call.id or "", call.function) for call in self.tool_calls or ()]
        calls += [("", self.function_call)] if self.function_call else []
        return replace(
            turn,
            reasoning=self.reasoning_content or self.reasoning or "",
            calls=tuple(
                PastCall(called.name, called.arguments, call_id) for call_id, called in calls
            ),
        )


def _canonical_part(part: TextPart | PicturePart | SoundPart | Foreign) -> str | Attachment:
    if isinstance(part, TextPart | Foreign):
        return part.text
    return Attachment(part.url, is_sound=isinstance(part, SoundPart))


class ChatCompletionRequest(ChatRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]

    @field_validator("tools", mode="before", json_schema_input_type=list[Tool | CustomTool])
    @classmethod
    def _known_tools(cls, value: object) -> object:
        return with_custom_tools(value)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _plain_choice(cls, value: object) -> object:
        return plain_choice(value)

    @property
    def conversation(self) -> Conversation:
        """The messages in the canonical form."""
        return [message.as_turn() for message in self.messages]
