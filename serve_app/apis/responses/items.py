"""The items of a response's input: messages, calls and their outputs.

Source: OpenAI's API reference, "Responses", `input`.
"""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)

from serve_app.apis.responses.tools import CallForm, Tools, functions
from serve_app.base.errors import InvalidRequestError
from serve_app.prompt.conversation import (
    Attachment,
    PastCall,
    Turn,
    json_object,
    json_text,
    texts_in,
)
from serve_app.server.answering.messages import SoundPart
from serve_app.server.answering.openai_tools import CUSTOM_INPUT
from serve_app.server.answering.requests import Effort, NamedSchema, Verbosity
from serve_app.server.answering.tools import LaterTools, refuse_media
from serve_app.server.http.request_model import AnyMember, Foreign, RequestModel, known_kind

Json = dict[str, Any]


class AnyFormat(RequestModel):
    """`text.format` without a schema."""

    type: Literal["text", "json_object"] = "text"


class SchemaFormat(NamedSchema):
    """`text.format` with a schema."""

    type: Literal["json_schema"]


class TextConfig(RequestModel):
    """`text`."""

    verbosity: Verbosity | None = None
    """Told to the chat template, which may know what to do with it."""
    format: Annotated[AnyFormat | SchemaFormat, Field(discriminator="type")] = Field(
        default=AnyFormat()
    )

    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema that answers must validate against, if there is one."""
        if isinstance(self.format, SchemaFormat):
            return self.format.schema_
        return {"type": "object"} if self.format.type == "json_object" else None


class ReasoningConfig(RequestModel):
    """`reasoning`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context": (None, "auto"),
        "mode": (None, "standard"),
    }

    effort: Effort | None = None
    """How much a model that can thinks before it answers; `none` and `minimal`: not at all."""
    summary: str | None = None
    """Whether reasoning is told as its summary, which it is then, whole: `auto`, `concise`, `detailed`."""
    generate_summary: str | None = None
    """The older name of `summary`."""


def _identity(kind: str) -> Json:
    return {"id": f"{kind}_{uuid.uuid4().hex}", "status": "completed"}


class InputTextPart(RequestModel):
    INERT: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "logprobs", "prompt_cache_breakpoint"}
    )

    type: Literal["input_text"]
    text: str = ""


class OutputTextPart(RequestModel):
    type: Literal["output_text"]
    text: str = ""
    annotations: Any = Field(default=[])
    logprobs: Any = Field(default=[])

    @field_validator("annotations", "logprobs", mode="before")
    @classmethod
    def _leave_out(cls, _value: object) -> list[object]:
        return []


class InputImagePart(RequestModel):
    INERT: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})
    REFUSED: ClassVar[frozenset[str]] = frozenset({"file_id"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": (None,)}

    type: Literal["input_image"]
    image_url: str
    """A data URL: `data:image/png;base64,…`."""
    detail: Any = "auto"

    @field_validator("detail", mode="before")
    @classmethod
    def _as_if_left_out(cls, _value: object) -> str:
        return "auto"


def _normalise_parts(value: object) -> object:
    """Content as a list of parts, whichever form a client sends."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    parts = [value] if isinstance(value, dict) else value
    if not isinstance(parts, list):
        return [] if parts is None else parts
    refuse_media(parts, "input", takes={"input_image", "input_audio"})
    return [_normalise_part(part) for part in parts if part is not None]


def _normalise_part(part: object) -> object:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if isinstance(part, dict) and part.get("type", "text") in ("text", "refusal"):
        return {"type": "output_text", "text": "\n".join(texts_in(part))}
    return part


AnyPart = Annotated[
    Annotated[InputTextPart, Tag("input_text")]
    | Annotated[OutputTextPart, Tag("output_text")]
    | Annotated[InputImagePart, Tag("input_image")]
    | Annotated[SoundPart, Tag("input_audio")]
    | Annotated[Foreign, Tag("foreign")],
    Discriminator(known_kind("input_text", "output_text", "input_image", "input_audio")),
    AnyMember,
]
Parts = Annotated[
    list[AnyPart], BeforeValidator(_normalise_parts, json_schema_input_type=str | list[AnyPart])
]


def _canonical_parts(parts: Sequence[AnyPart]) -> tuple[str | Attachment, ...]:
    return tuple(
        Attachment(part.image_url)
        if isinstance(part, InputImagePart)
        else Attachment(part.url, is_sound=True)
        if isinstance(part, SoundPart)
        else part.text
        for part in parts
    )


class Item(RequestModel):
    """An item of `input`. Clients send items of earlier answers as they got them."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {
            *("id", "status", "phase", "created_by"),
            *("name", "environment", "execution", "max_output_length"),  # the call's id says enough
        }
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "namespace": (None,),
        "caller": (None, {"type": "direct"}),
        "async": (None, False),
    }


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: str
    content: Parts = Field(default=[])

    def as_turn(self) -> Turn:
        return Turn.of(self.role, _canonical_parts(self.content))

    def to_json(self) -> Json:
        return {**_identity("msg"), **self.model_dump()}


class CallItem(Item):
    """A call that the assistant made in an earlier turn, of a function or of another tool of the client."""

    type: Literal[
        "function_call",
        "custom_tool_call",
        "tool_search_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
    ]
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    """The arguments of a function: history, which need not be JSON."""
    input: str = ""
    """The text that a custom tool got."""
    action: Json = Field(default={})
    """The command of a shell."""
    operation: Json = Field(default={})
    """The change of a file."""

    @field_validator("arguments", "input", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return json_text(value)

    @field_validator("action", "operation", mode="before")
    @classmethod
    def _as_object(cls, value: object) -> object:
        return value if isinstance(value, dict) else {"input": value}

    def as_call(self) -> PastCall:
        """The call in the canonical form: of the function that stands for the tool."""
        form = CallForm.of_item(self.type, self.name, self.namespace)
        said = {"custom": {CUSTOM_INPUT: self.input}, "apply_patch": self.operation}
        arguments = json_text(said.get(form.kind, self.action))
        is_plain = form.kind in ("function", "tool_search")
        return PastCall(form.function, self.arguments if is_plain else arguments, self.call_id)

    def to_json(self) -> Json:
        item = {**_identity("fc"), **self.model_dump(exclude_unset=True), "type": self.type}
        if self.type == "tool_search_call":
            item["arguments"] = json_object(self.arguments) or {}
        return item


class CallOutputItem(Item):
    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: str = ""
    output: Parts = Field(default=[])

    @model_validator(mode="before")
    @classmethod
    def _id_of_call(cls, item: Any) -> Any:
        """Outputs of a local shell have the call's id for their own."""
        if isinstance(item, dict) and item.get("type") == "local_shell_call_output":
            return {"call_id": item.get("id"), **item}
        return item

    def as_turn(self) -> Turn:
        return Turn("tool", _canonical_parts(self.output), call_id=self.call_id)

    def to_json(self) -> Json:
        item = {**_identity("fco"), **self.model_dump()}
        if len(self.output) == 1 and isinstance(self.output[0], InputTextPart | OutputTextPart):
            item["output"] = self.output[0].text
        return item


class LaterToolsItem(Item):
    """Tools that the model knows from here on: those that a search found, or that are added."""

    type: Literal["tool_search_output", "additional_tools"]
    call_id: str = ""
    role: str | None = None
    execution: str | None = None
    tools: Tools = Field(default=[])

    def as_turn(self, later: LaterTools) -> Turn:
        made = list(functions(self.tools))
        text = later.add(made) if made else "No tool was found."
        if self.type == "additional_tools":
            return Turn("system", (text,))
        return Turn("tool", (text,), call_id=self.call_id)

    def to_json(self) -> Json:
        return {**_identity("tso"), **self.model_dump(exclude_none=True)}


class ConfigurationItem(Item):
    """The reasoning and the form of the answer from here on."""

    type: Literal["configuration_update"]
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None

    def to_json(self) -> Json:
        return {**_identity("cu"), **self.model_dump(by_alias=True, exclude_none=True)}


class ReasoningText(RequestModel):
    type: str
    text: str = ""


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default=[])
    content: list[ReasoningText] = Field(default=[])
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning as it was said, or its summary; empty if only another server can read it."""
        text = "".join(part.text for part in self.content)
        text = text or unseal(self.encrypted_content or "")
        return text or "".join(part.text for part in self.summary)

    def to_json(self) -> Json:
        return {**_identity("rs"), "type": self.type, **reasoning_fields(self.text)}


class ReferenceItem(Item):
    """An item of a kept response, by its id."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1, max_length=128)]


_SEAL = "corral-reasoning-1:"
MOST_REASONING_BYTES = 2**22
"""The most bytes that a sealed reasoning can have: more than a context has."""


def reasoning_fields(text: str, *, is_sealed: bool = False) -> Json:
    """The fields of an item with this reasoning. Sealed, it has the text once more in a form that clients
    give back unseen, as they do where the server keeps nothing. The form hides nothing."""
    sealed = _SEAL + base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"summary": [], "content": content, "encrypted_content": sealed if is_sealed else None}


def unseal(sealed: str) -> str:
    """The reasoning in `encrypted_content`; empty if it is not this server's."""
    if not sealed.startswith(_SEAL):
        return ""
    try:
        data = base64.b64decode(sealed.removeprefix(_SEAL), validate=True)
        return zlib.decompressobj().decompress(data, MOST_REASONING_BYTES).decode()
    except (ValueError, zlib.error):
        return ""


def _items(value: object) -> object:
    """A text is short for one message of it; messages need not say that they are some."""
    items = [value] if isinstance(value, str | dict) else value
    return [_item(item) for item in items] if isinstance(items, list) else items


_REFUSED = {
    "compaction": "only the server that made it can read it",
    "compaction_trigger": "no conversation is compacted",
}
"""Items that stand for a conversation which this server cannot know, and why they are refused."""


def _item(item: object) -> object:
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(item, dict) and kind is None and item.keys() <= {"id", "type"}:
        return {**item, "type": "item_reference"}
    if isinstance(kind, str) and kind in _REFUSED:
        raise InvalidRequestError(
            f"Items of the type {kind!r} are not supported: {_REFUSED[kind]}.", "input"
        )
    if isinstance(item, str):
        return {"type": "message", "role": "user", "content": item}
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


_CALLS = (
    *("function_call", "custom_tool_call", "local_shell_call", "shell_call"),
    "apply_patch_call",
)
_TAGS = {
    **dict.fromkeys((*_CALLS, "tool_search_call"), "call"),
    **{f"{call}_output": "output" for call in _CALLS},
    **dict.fromkeys(("tool_search_output", "additional_tools"), "tools"),
}


def _kind_of_item(item: Any) -> str:
    kinds = ("message", "reasoning", "configuration_update", "item_reference", *_TAGS)
    kind = known_kind(*kinds)(item)
    return _TAGS.get(kind, kind)


AnyItem = (
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[LaterToolsItem, Tag("tools")]
    | Annotated[ConfigurationItem, Tag("configuration_update")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[Foreign, Tag("foreign")]
)
SentItem = Annotated[
    AnyItem | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_kind_of_item),
    AnyMember,
]
Items = Annotated[
    list[SentItem], BeforeValidator(_items, json_schema_input_type=str | list[SentItem])
]
_KEPT: TypeAdapter[list[AnyItem]] = TypeAdapter(
    list[Annotated[AnyItem, Discriminator(_kind_of_item), AnyMember]]
)


def reference_ids(items: Iterable[SentItem]) -> list[str]:
    """The ids of the items that are kept elsewhere. Raises InvalidRequestError if one comes twice."""
    ids = [item.id for item in items if isinstance(item, ReferenceItem)]
    _check_distinct(ids)
    return ids


def _check_distinct(ids: Iterable[str]) -> None:
    twice = next((name for name, n in Counter(ids).items() if n > 1), None)
    if twice is not None:
        raise InvalidRequestError(
            f"Duplicate item found with id {twice}. Remove duplicate items from your input and try again.",
            "input",
        )


class ConversationItems(NamedTuple):
    """The items that a response answers, once as they are kept, and once to be read."""

    as_json: list[Json]
    read: list[AnyItem]

    @classmethod
    def of(
        cls, before: list[Json], items: Iterable[SentItem], kept: Mapping[str, Json]
    ) -> ConversationItems:
        """The items of a request behind those before it; `kept` has what it refers to, by ids."""
        new = cls(list(before), _KEPT.validate_python(before))
        for item in items:
            if isinstance(item, ReferenceItem):
                new.as_json.append(kept[item.id])
                new.read.extend(_KEPT.validate_python([kept[item.id]]))
                continue
            new.read.append(item)
            if isinstance(item, Foreign):
                own = _identity("item")
                new.as_json.append({**own, **item.model_dump(), "id": own["id"]})
            else:
                new.as_json.append(item.to_json())
        if kept:
            _check_distinct(item["id"] for item in new.as_json)
        return new

    def pack(self) -> bytes:
        """The JSON of what is kept."""
        return json.dumps(self.as_json, ensure_ascii=False, separators=(",", ":")).encode()


def turns(items: Iterable[AnyItem], later: LaterTools) -> list[Turn]:
    """The items in the canonical form: an assistant's reasoning and calls belong to its turn. Items of
    other kinds are what the assistant did, if they carry text. `later` gets the tools that items make
    known."""
    result: list[Turn] = []
    reasoning = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning += item.text
            continue
        if isinstance(item, ConfigurationItem):
            continue
        if isinstance(item, CallItem):
            # Reasoning begins a turn.
            is_same_turn = bool(result) and result[-1].role == "assistant" and not reasoning
            turn = result.pop() if is_same_turn else Turn("assistant")
            turn = replace(turn, calls=(*turn.calls, item.as_call()))
        elif isinstance(item, MessageItem | CallOutputItem):
            turn = item.as_turn()
        elif isinstance(item, LaterToolsItem):
            turn = item.as_turn(later)
        elif item.text:
            turn = Turn("assistant", (item.text,))
        else:
            continue
        if turn.role == "assistant" and reasoning:
            turn = replace(turn, reasoning=reasoning)
        reasoning = ""
        result.append(turn)
    return result
