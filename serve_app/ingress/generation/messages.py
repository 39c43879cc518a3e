"""The turns and tools of a chat as OpenAI's clients send them.

Source: OpenAI's API reference, "Chat".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serve_app.errors import InvalidRequestError
from serve_app.ingress.http import media
from serve_app.ingress.http.request_model import RequestModel
from serve_app.prompt.conversation import Attachment, PastCall, Turn

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(RequestModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(RequestModel):
    """Where a picture is."""

    INERT: ClassVar[frozenset[str]] = frozenset({"detail"})

    url: str
    """A data URL: `data:image/png;base64,…`."""


class PicturePart(RequestModel):
    """A picture in a user's message."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @field_validator("image_url", mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @property
    def url(self) -> str:
        """Where it is."""
        return self.image_url.url

    @classmethod
    def of(cls, url: str) -> PicturePart:
        """The picture at that URL."""
        return cls(type="image_url", image_url=ImageUrl(url=url))


class InputAudio(RequestModel):
    """A sound."""

    data: Annotated[str, Field(min_length=1)]
    """A file in base64, or a data URL: `data:audio/wav;base64,…`."""
    format: Literal["wav", "mp3", "flac"] = "wav"
    """The kind of the file, which the file itself tells, too."""


class SoundPart(RequestModel):
    """A sound in a user's message."""

    type: Literal["input_audio"]
    input_audio: InputAudio

    @property
    def url(self) -> str:
        """It as a data URL."""
        data = self.input_audio.data
        is_url = data[:5].lower() == "data:"
        return data if is_url else f"data:audio/{self.input_audio.format};base64,{data}"


MediumPart = PicturePart | SoundPart
AnyPart = Annotated[TextPart | MediumPart, Field(discriminator="type")]


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; none means no parameters."""
    strict: bool | None = None
    """Whether arguments are held to the schema; where calls are forced, they always are."""


class Tool(RequestModel):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The message for chat templates: the fields that were given, in their order."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class FunctionCall(RequestModel):
    """The function and the arguments of an earlier call."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """A call that the assistant made in an earlier turn."""

    model_config = ConfigDict(extra="ignore")  # the openai package echoes a stream's `index`

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One turn of a chat."""

    # The openai package echoes an assistant's turn with all of its fields, empty ones too.
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "refusal": (None,),
        "annotations": (None, []),
        "audio": (None,),
        "function_call": (None,),
    }
    REFUSED: ClassVar[frozenset[str]] = frozenset({"audio", "function_call"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[AnyPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: object) -> object:
        media.refuse(value, "messages", takes={"image_url", "input_audio"})
        return value

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError(
                "Only messages of the assistant may have 'tool_calls'.", "messages"
            )
        if self.reasoning_content and self.role != "assistant":
            raise InvalidRequestError(
                "Only messages of the assistant may have 'reasoning_content'.", "messages"
            )
        if (self.role == "tool") is (self.tool_call_id is None):
            raise InvalidRequestError(
                "Messages of the role 'tool', and only these, need a 'tool_call_id'.", "messages"
            )
        if self.media and self.role not in ("user", "tool"):
            raise InvalidRequestError(
                f"Messages of the role {self.role!r} cannot have pictures or sounds.", "messages"
            )
        if self.content is None and not self.tool_calls:
            raise InvalidRequestError("A message has no 'content'.", "messages")
        return self

    def as_turn(self) -> Turn:
        """The message in the canonical form. A developer is what newer clients call the system."""
        parts = [self.content] if isinstance(self.content, str) else self.content or []
        return Turn(
            "system" if self.role == "developer" else self.role,
            tuple(
                part
                if isinstance(part, str)
                else part.text
                if isinstance(part, TextPart)
                else Attachment(part.url, is_sound=isinstance(part, SoundPart))
                for part in parts
            ),
            self.reasoning_content or "",
            tuple(
                PastCall(call.function.name, call.function.arguments, call.id)
                for call in self.tool_calls or ()
            ),
            self.tool_call_id or "",
            self.name or "",
        )

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.as_turn().text

    @property
    def media(self) -> list[MediumPart]:
        """The pictures and sounds among its parts."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part for part in parts if not isinstance(part, TextPart)]
