"""The types of OpenAI's requests for responses, and their translation to a chat.

Source: OpenAI's API reference, "Responses".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from serve_app.errors import InvalidRequestError
from serve_app.ingress.generation.requests import (
    MOST_TOKENS,
    CacheSalt,
    Effort,
    NamedSchema,
    PingInterval,
    TranslatedChat,
    Verbosity,
)
from serve_app.ingress.generation.sampling_fields import given, takes_sampling
from serve_app.ingress.http.request_model import RequestModel, name_ignored
from serve_app.ingress.openai.tools import plain_choice
from serve_app.ingress.responses.items import AnyItem, Items, turns
from serve_app.ingress.responses.tools import Tools, functions
from serve_app.prompt.conversation import Turn
from serve_app.sampling import Api


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


class ResponseStreamOptions(RequestModel):
    """`stream_options`."""

    include_obfuscation: bool = False
    """Whether pieces of text come with noise, so that their sizes do not show what they are."""


class ReasoningConfig(RequestModel):
    """`reasoning`."""

    INERT: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary"})

    effort: Effort | None = None
    """How much a model that can thinks before it answers; `none` and `minimal`: not at all."""


@takes_sampling(Api.RESPONSES)
class ResponsesRequest(RequestModel):
    """POST /v1/responses."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context_management": (None, []),
        "conversation": (None,),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    }
    REFUSED: ClassVar[frozenset[str]] = frozenset({"conversation", "prompt"})
    INERT: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
        }
    )

    model: str | None = None
    """A name from /v1/models; the first of them if it is missing."""
    input: Items
    """A text, or a list of items."""
    include: list[str] | None = None
    """More that the answer shall have. Reasoning always has `encrypted_content`; all else is ignored, and
    the answer names it."""
    instructions: str | None = None
    """The system's message, before everything else."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    tools: Tools = Field(default=[])
    """Functions and tools that the client runs; all others are left out, and the answer names them."""
    tool_choice: Any = None
    """`auto`, `none`, `required`, or an object that names a tool, or those that are allowed."""
    parallel_tool_calls: bool | None = None
    text: TextConfig = Field(default=TextConfig())
    stream: bool = False
    user: str | None = None
    """The user whose request this is. Slots are shared fairly among users."""
    cache_salt: CacheSalt | None = None
    """vLLM's: cached prefixes are shared only with requests that send the same."""
    sse_ping_interval: PingInterval | None = None
    """llama-server's: a stream in which nothing was sent for so many seconds sends a comment; 0 and -1:
    never. Without it, `ingress.sse_ping_interval_s` counts."""
    return_progress: bool = False
    """llama-server's: whether a stream tells how far its prompt is computed, in `prompt_progress`."""
    timings_per_token: bool = False
    """llama-server's: whether a stream's events tell `timings`."""
    metadata: dict[str, str] | None = None
    """Given back with the answer."""
    previous_response_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A response that is kept: its conversation comes before `input`."""
    store: bool | None = None
    """Whether the response is kept for some minutes, to go on from and to be asked for again; it is by
    default."""
    background: bool | None = None
    """Whether it is made however soon the client leaves. That needs `store`."""
    stream_options: ResponseStreamOptions | None = None
    reasoning: ReasoningConfig | None = None

    @field_validator("include")
    @classmethod
    def _name_what_is_not_included(cls, value: list[str] | None) -> list[str] | None:
        names = value or ()
        name_ignored(f"include.{name}" for name in names if name != "reasoning.encrypted_content")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.background and self.store is False:
            raise InvalidRequestError("'background' needs 'store'.", "background")
        return self

    @property
    def obfuscates(self) -> bool:
        """Whether the events of a stream are padded, as ResponseStreamOptions says."""
        return self.stream_options is not None and self.stream_options.include_obfuscation

    def as_chat(self, before: Sequence[AnyItem] = ()) -> TranslatedChat:
        """Translate the request to OpenAI's chat, behind these items. Raises InvalidRequestError."""
        conversation = turns([*before, *self.input])
        if not (before or self.input):
            raise InvalidRequestError("'input' has no message.", "input")
        if self.instructions:
            conversation.insert(0, Turn("system", (self.instructions,)))
        return TranslatedChat(
            turns=conversation,
            stream=self.stream,
            sse_ping_interval=self.sse_ping_interval,
            max_tokens=self.max_output_tokens,
            json_schema=self.text.schema_of_answer(),
            tools=list(functions(self.tools)),
            tool_choice=plain_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            user=self.user,
            cache_salt=self.cache_salt,
            return_progress=self.return_progress,
            timings_per_token=self.timings_per_token,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            verbosity=self.text.verbosity,
            **given(self, Api.RESPONSES),
        )
