"""OpenAI's requests and answers as types.

Source: OpenAI's API reference, "Completions" and "Chat"; sampling parameters that it lacks have
llama-server's names and defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from serve_app.errors import InvalidRequestError
from serve_app.types import SamplingParams

_DEFAULTS = SamplingParams()

Finite = Annotated[float, Field(allow_inf_nan=False)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    """Send one more chunk, with the usage and no choices, before the end."""


class GenerationParams(BaseModel):
    """What completions and chat completions share.

    A field that OpenAI documents and Corral cannot honour is refused unless its value asks for what
    happens anyway (`n: 1`); one that nobody documents is refused always.
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    # OpenAI's fields that change nothing at these values.
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "n": (None, 1),
        "logprobs": (None, False, 0),
        "top_logprobs": (None, 0),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "prediction": (None,),
    }

    model: str | None = None
    """A name from /v1/models; the first of them if it is missing."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 keep all tokens."""
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Tokens that the three penalties look back on, prompt included; -1 means the whole context."""
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[int, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    """Token id to what is added to its logit; -100 bans the token."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[Stop], Field(max_length=16), BeforeValidator(_one_or_many)] | None = None
    """One string, or up to 16."""
    ignore_eos: bool = False
    user: str | None = None
    """Whose request it is: slots are shared fairly among users."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """vLLM's: lower ones get a slot first."""
    context_shift: bool | None = None
    """Whether to go on when the context is full, with its oldest tokens dropped, up to `max_tokens`."""
    n_keep: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """llama-server's: first tokens that a context shift keeps; -1 keeps all of the prompt."""
    metadata: dict[str, Any] | None = None
    """Accepted and not used."""

    @model_validator(mode="after")
    def _refuse_what_cannot_be_honoured(self) -> GenerationParams:
        for name, value in (self.model_extra or {}).items():
            if name not in self.NEUTRAL:
                raise InvalidRequestError(f"Unknown parameter: {name!r}.", name)
            if value not in self.NEUTRAL[name]:
                accepted = " or ".join(json.dumps(neutral) for neutral in self.NEUTRAL[name])
                raise InvalidRequestError(f"{name!r} is not supported, except as {accepted}.", name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("'stream_options' needs 'stream': true.", "stream_options")
        return self

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """The engine's parameters; what the request leaves open has Corral's defaults."""
        given = {
            name: value
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "typical_p",
                "repeat_penalty",
                "repeat_last_n",
                "frequency_penalty",
                "presence_penalty",
                "seed",
            )
            if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            **given,
            top_k=_DEFAULTS.top_k if self.top_k is None else max(0, self.top_k),
            logit_bias=tuple(
                (token, float("-inf") if bias == -100 else bias)
                for token, bias in (self.logit_bias or {}).items()
            ),
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(GenerationParams):
    """POST /v1/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationParams.NEUTRAL,
        "best_of": (None, 1),
        "echo": (None, False),
        "suffix": (None, ""),
    }

    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    )
    """One text, or one list of token ids."""
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    """OpenAI's default; null means up to the end of the context."""


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; none means no parameters."""
    strict: Literal[False] | None = None
    """Arguments are not held to the schema, so `true` cannot be honoured."""


class Tool(BaseModel):
    """One of `tools`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """What chat templates read: the fields that were given, in the order they were."""
        return self.model_dump(exclude_unset=True)


class FunctionCall(BaseModel):
    """The function and the arguments of an earlier call."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """What chat templates read: the arguments as an object. Raises InvalidRequestError."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except json.JSONDecodeError as error:
            raise InvalidRequestError(
                f"The arguments of the call of {self.name!r} are not JSON: {error}", "messages"
            ) from error
        if not isinstance(arguments, dict):
            raise InvalidRequestError(
                f"The arguments of the call of {self.name!r} are no JSON object.", "messages"
            )
        return {"name": self.name, "arguments": arguments}


class MessageToolCall(BaseModel):
    """A call that the assistant made in an earlier turn."""

    model_config = ConfigDict(extra="ignore")  # the openai package echoes a stream's `index`

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatMessage:
        # The openai package echoes an assistant's turn with all of its fields, empty ones too.
        for name, value in (self.model_extra or {}).items():
            if value not in (None, []):
                raise InvalidRequestError(f"{name!r} is not supported in a message.", "messages")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError("Only an assistant's message has 'tool_calls'.", "messages")
        if (self.role == "tool") is (self.tool_call_id is None):
            raise InvalidRequestError(
                "A tool's message, and no other, has a 'tool_call_id'.", "messages"
            )
        if self.content is None and not self.tool_calls:
            raise InvalidRequestError("A message has no 'content'.", "messages")
        return self

    def for_template(self) -> dict[str, Any]:
        """What chat templates read. A developer is what newer clients call the system."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": call.function.for_template()}
                for call in self.tool_calls
            ]
        return message

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatCompletionRequest(GenerationParams):
    """POST /v1/chat/completions."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationParams.NEUTRAL,
        "functions": (None, []),
        "function_call": (None, "auto", "none"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "web_search_options": (None,),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens; counts before it."""
    tools: list[Tool] = Field(default=[])
    """Functions that the model may call, if its chat template asks for calls in the Hermes format."""
    tool_choice: Literal["auto", "none"] | None = None
    """`none` hides the tools from the model; forced calls are not supported."""
    parallel_tool_calls: bool | None = None
    """With tools, only as true: a model calls as many functions in a turn as it wants."""

    @field_validator("tools", mode="before")
    @classmethod
    def _null_is_none(cls, value: object) -> object:
        return [] if value is None else value

    @model_validator(mode="after")
    def _refuse_single_calls(self) -> ChatCompletionRequest:
        if self.tools and self.parallel_tool_calls is False:
            raise InvalidRequestError(
                "'parallel_tool_calls' is not supported, except as true.", "parallel_tool_calls"
            )
        return self

    def tools_for_template(self) -> list[dict[str, Any]]:
        """What chat templates read; empty if the model shall call nothing."""
        return [] if self.tool_choice == "none" else [tool.for_template() for tool in self.tools]


class ModelCard(BaseModel):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Unix time at which the ingress started."""
    owned_by: Literal["corral"] = "corral"
    n_ctx_slot: int
    """Tokens, prompt and answer together, that one request may have."""


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(BaseModel):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is not a success."""

    error: ErrorBody
