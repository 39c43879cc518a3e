"""The turns of a chat as Anthropic's clients send them.

Source: Anthropic's API reference, "Messages".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serve_app.errors import InvalidRequestError
from serve_app.ingress.generation.messages import (
    AnyPart,
    ChatMessage,
    FunctionCall,
    MessageToolCall,
    PicturePart,
    TextPart,
)
from serve_app.ingress.http import media
from serve_app.ingress.http.request_model import RequestModel


class Block(RequestModel):
    """A block of content. Prompts are cached anyway, so where to cache says nothing new."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "citations": (None, []),
        "caller": (None, {"type": "direct"}),
        "toolset_name": (None,),
    }
    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str


class PictureSource(RequestModel):
    """Where a picture is."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str = ""
    """In base64."""
    url: str = ""

    @property
    def as_url(self) -> str:
        """As a URL."""
        return self.url if self.type == "url" else f"data:;base64,{self.data}"


class PictureBlock(Block):
    """A picture."""

    type: Literal["image"]
    source: PictureSource

    def as_part(self) -> PicturePart:
        """As OpenAI has it."""
        return PicturePart.of(self.source.as_url)


def _texts(value: object) -> object:
    """A text is short for one block of it; other media are refused by their names."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    media.refuse(value, "messages")
    return value


def _blocks(value: object) -> object:
    """The same, with pictures."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    media.refuse(value, "messages", takes={"image"})
    return value


Texts = Annotated[
    list[TextBlock], BeforeValidator(_texts, json_schema_input_type=str | list[TextBlock])
]
_Seen = list[Annotated[TextBlock | PictureBlock, Field(discriminator="type")]]


def joined(blocks: Sequence[TextBlock | PictureBlock]) -> str:
    """The blocks' texts as one."""
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def _part(block: TextBlock | PictureBlock) -> AnyPart:
    """As OpenAI has it."""
    if isinstance(block, PictureBlock):
        return block.as_part()
    return TextPart(type="text", text=block.text)


class ToolUseBlock(Block):
    """A call that the assistant made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def as_call(self) -> MessageToolCall:
        """The call as OpenAI has it."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        return MessageToolCall(
            id=self.id, function=FunctionCall(name=self.name, arguments=arguments)
        )


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[_Seen, BeforeValidator(_blocks, json_schema_input_type=str | _Seen)] = Field(
        default=[]
    )
    is_error: bool = False

    def as_message(self) -> ChatMessage:
        """The result as a turn of its own. Templates know no errors, so the text says it."""
        text = ("Error: " if self.is_error else "") + joined(self.content)
        seen: list[AnyPart] = [
            block.as_part() for block in self.content if isinstance(block, PictureBlock)
        ]
        return ChatMessage(
            role="tool",
            tool_call_id=self.tool_use_id,
            content=[TextPart(type="text", text=text), *seen] if seen else text,
        )


class ThinkingBlock(BaseModel):
    """Reasoning of an earlier turn. Redacted thinking cannot be read; signatures are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


Content = list[
    Annotated[
        TextBlock | PictureBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
        Field(discriminator="type"),
    ]
]


class Message(RequestModel):
    """One turn."""

    INERT: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    role: Literal["user", "assistant", "system"]
    content: Annotated[Content, BeforeValidator(_blocks, json_schema_input_type=str | Content)]

    @model_validator(mode="after")
    def _check(self) -> Message:
        of_assistant, of_user = (ToolUseBlock, ThinkingBlock), (ToolResultBlock,)
        foreign: tuple[type, ...] = (*of_assistant, *of_user)
        if self.role != "system":
            foreign = of_user if self.role == "assistant" else (ToolUseBlock,)
        for block in self.content:
            if isinstance(block, foreign):
                message = (
                    f"No block of the type {block.type!r} can be in a turn of the {self.role}."
                )
                raise InvalidRequestError(message, "messages")
        return self

    def as_messages(self, *, reasoning: bool) -> list[ChatMessage]:
        """The turn as OpenAI has it: tools' results are turns of their own; `reasoning` keeps that of the
        assistant."""
        results = [b.as_message() for b in self.content if isinstance(b, ToolResultBlock)]
        calls = [block.as_call() for block in self.content if isinstance(block, ToolUseBlock)]
        parts = [
            _part(block) for block in self.content if isinstance(block, TextBlock | PictureBlock)
        ]
        if results and not parts:
            return results
        thinking = "".join(b.thinking for b in self.content if isinstance(b, ThinkingBlock))
        turn = ChatMessage(
            role=self.role,
            content=parts,
            tool_calls=calls or None,
            reasoning_content=thinking if reasoning and self.role == "assistant" else None,
        )
        return [*results, turn]
