"""The items of a response's input: messages, calls and their outputs.

Source: OpenAI's API reference, "Responses", `input`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
)

from serve_app.ingress.generation import messages
from serve_app.ingress.http import media
from serve_app.ingress.http.request_model import Foreign, RequestModel, known_kind, texts_in
from serve_app.prompt.conversation import Attachment, PastCall, Turn

Json = dict[str, Any]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _identity(kind: str) -> Json:
    return {"id": f"{kind}_{uuid.uuid4().hex}", "status": "completed"}


class Part(RequestModel):
    """A part of a message's content, or of a call's output."""

    INERT: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text"]
    text: str = ""

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


class ForeignItem(Foreign):
    """A part or an item of a kind that Corral does not know: kept, and given back as it is."""

    def told(self) -> Json:
        """As it is kept and given back."""
        return self.model_dump()


def _kind_of_part(part: Any) -> str:
    kind = known_kind("input_text", "output_text", "input_image", "input_audio")(part)
    return "text" if kind.endswith("_text") else kind


def _parts(value: object) -> object:
    """Content as a list of parts, whichever form a client sends."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    parts = [value] if isinstance(value, dict) else value
    if not isinstance(parts, list):
        return [] if parts is None else parts
    media.refuse(parts, "input", takes={"input_image", "input_audio"})
    return [_part(part) for part in parts if part is not None]


def _part(part: object) -> object:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if isinstance(part, dict) and part.get("type", "text") in ("text", "refusal"):
        return {"type": "output_text", "text": "\n".join(texts_in(part))}
    return part


AnyPart = Annotated[
    Annotated[Part, Tag("text")]
    | Annotated[PicturePart, Tag("input_image")]
    | Annotated[SoundPart, Tag("input_audio")]
    | Annotated[ForeignItem, Tag("foreign")],
    Discriminator(_kind_of_part),
]
Parts = Annotated[
    list[AnyPart], BeforeValidator(_parts, json_schema_input_type=str | list[AnyPart])
]


def _canonical(parts: Sequence[AnyPart]) -> tuple[str | Attachment, ...]:
    """Parts in the canonical form."""
    return tuple(
        Attachment(part.image_url)
        if isinstance(part, PicturePart)
        else Attachment(part.url, is_sound=True)
        if isinstance(part, SoundPart)
        else part.text
        for part in parts
    )


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
    content: Parts = Field(default=[])

    def as_turn(self) -> Turn:
        """The message in the canonical form."""
        return Turn("system" if self.role == "developer" else self.role, _canonical(self.content))

    def told(self) -> Json:
        """As it is kept and given back."""
        content = [part.told() for part in self.content]
        return {**_identity("msg"), "type": self.type, "role": self.role, "content": content}


class FunctionCallItem(Item):
    """A call that the assistant made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    """History, which need not be JSON."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return value if isinstance(value, str) else _json(value)

    def as_call(self) -> PastCall:
        """The call in the canonical form."""
        return PastCall(self.name, self.arguments, self.call_id)

    def told(self) -> Json:
        """As it is kept and given back."""
        return {**_identity("fc"), **self.model_dump()}


class ClientCallItem(BaseModel):
    """An earlier call of a tool that the client runs, and that is no function."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str = ""
    name: str | None = None
    input: str | None = None
    """The text that a custom tool got."""
    action: Json | None = None
    operation: Json | None = None

    def as_call(self) -> PastCall:
        """The call in the canonical form: of a function of that name."""
        name = self.name or self.type.removesuffix("_call")
        arguments = self.action or self.operation or {"input": self.input or ""}
        return PastCall(name, _json(arguments), self.call_id)

    def told(self) -> Json:
        """As it is kept and given back."""
        return {**_identity("ctc"), **self.model_dump(exclude_none=True)}


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: str = ""
    output: Parts = Field(default=[])

    def as_turn(self) -> Turn:
        """The output in the canonical form."""
        return Turn("tool", _canonical(self.output), call_id=self.call_id)

    def told(self) -> Json:
        """As it is kept and given back."""
        output: Any = [part.told() for part in self.output]
        if len(self.output) == 1 and isinstance(self.output[0], Part):
            output = self.output[0].text
        return {
            **_identity("fco"),
            "type": self.type,
            "call_id": self.call_id,
            "output": output,
        }


class ReasoningItem(BaseModel):
    """Reasoning of an earlier turn, which is dropped."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


def _items(value: object) -> object:
    """A text is short for one message of it; messages need not say that they are some."""
    items = [value] if isinstance(value, str | dict) else value
    return [_item(item) for item in items] if isinstance(items, list) else items


def _item(item: object) -> object:
    if isinstance(item, str):
        return {"type": "message", "role": "user", "content": item}
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


_CALLS = ("custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")


def _kind_of_item(item: Any) -> str:
    outputs = ("function_call_output", *(f"{call}_output" for call in _CALLS))
    kind = known_kind("message", "function_call", "reasoning", *_CALLS, *outputs)(item)
    return "client_call" if kind in _CALLS else "output" if kind in outputs else kind


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[ClientCallItem, Tag("client_call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ForeignItem, Tag("foreign")],
    Discriminator(_kind_of_item),
]
Items = Annotated[
    list[AnyItem], BeforeValidator(_items, json_schema_input_type=str | list[AnyItem])
]


def kept(before: Sequence[Json], items: Iterable[AnyItem]) -> bytes:
    """A conversation as JSON, for `before` of the next response. Reasoning is not part of it."""
    new = [item.told() for item in items if not isinstance(item, ReasoningItem)]
    return json.dumps([*before, *new], ensure_ascii=False, separators=(",", ":")).encode()


def turns(items: Iterable[AnyItem]) -> list[Turn]:
    """The items in the canonical form: an assistant's calls belong to its turn. Items of other kinds are
    what the assistant did, if they carry text."""
    made: list[Turn] = []
    for item in items:
        if isinstance(item, MessageItem | CallOutputItem):
            made.append(item.as_turn())
        elif isinstance(item, FunctionCallItem | ClientCallItem):
            is_same_turn = bool(made) and made[-1].role == "assistant"
            turn = made.pop() if is_same_turn else Turn("assistant")
            made.append(replace(turn, calls=(*turn.calls, item.as_call())))
        elif isinstance(item, ForeignItem) and item.text:
            made.append(Turn("assistant", (item.text,)))
    return made
