"""The types of Ollama's requests, and their translation to OpenAI's chat.

Source: ollama, api/types.go, docs/api.md, and docs/modelfile.mdx, "Valid Parameters and Values".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator

from serve_app.base.errors import InvalidRequestError
from serve_app.base.sampling import Api
from serve_app.config.sampling_fields import read_params, takes_sampling
from serve_app.prompt.conversation import Attachment, PastCall, Turn, text_of
from serve_app.server.answering.openai_tools import known_tools
from serve_app.server.answering.requests import (
    MAX_LOGPROBS,
    CacheSalt,
    GenerationParams,
    PingInterval,
    TranslatedChat,
)
from serve_app.server.answering.tools import Tool
from serve_app.server.http.request_model import RequestModel


def parts(text: str, images: Sequence[str] | None) -> tuple[str | Attachment, ...]:
    """A turn's parts: pictures, which are in base64, stand before the text, as at Ollama."""
    return (*(Attachment(f"data:;base64,{image}") for image in images or ()), text)


class OllamaCalledFunction(RequestModel):
    """The function that an earlier turn called."""

    INERT: ClassVar[frozenset[str]] = frozenset({"index"})  # the calls stand in its order

    name: str = ""
    arguments: Any = None


class OllamaCall(RequestModel):
    """A call that the assistant made in an earlier turn."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"type": (None, "function")}

    id: str | None = None
    function: OllamaCalledFunction = Field(default=OllamaCalledFunction())

    def as_call(self) -> PastCall:
        """The call in the canonical form."""
        return PastCall.of(self.function.name, self.function.arguments, self.id or "")


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


_INT_MAX = 2**31 - 1


@takes_sampling(Api.OPENAI)
class Options(RequestModel):
    """The sampling parameters, which have the same names at Ollama, and these. Those that say how a model
    is loaded are ignored: the configuration says that. `num_ctx`, which an answer may show, is named."""

    INERT: ClassVar[frozenset[str]] = frozenset(
        {
            "embedding_only",
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "num_batch",
            "num_gpu",
            "num_gqa",
            "num_thread",
            "numa",
            "use_mlock",
            "use_mmap",
            "vocab_only",
        }
    )
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "num_ctx": (None,),
        "tfs_z": (None, 1),
        "penalize_newline": (None, False),
    }

    num_predict: Annotated[int, Field(ge=-2, le=_INT_MAX)] | None = None
    """Most tokens to generate; 0 and less for all that the context has room for."""
    num_keep: Annotated[int, Field(ge=-1, le=_INT_MAX)] | None = None
    """First tokens of the prompt that stay when it is cut or the context is shifted; -1 for all."""

    @field_validator("stop", mode="before", check_fields=False)
    @classmethod
    def _several_and_not_empty(cls, value: object) -> object:
        texts = [value] if isinstance(value, str) else value
        return [text for text in texts if text != ""] if isinstance(texts, list) else texts

    @property
    def max_tokens(self) -> int | None:
        """None means up to the end of the context."""
        most = self.num_predict
        return most if most is not None and most > 0 else None


# Go's durations, `5m`, `1h30m`, `-1s`, and seconds without their unit.
_DURATION = re.compile(r"[-+]?(?:(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|\d+(?:\.\d*)?)")
_NUMBER = re.compile(r"\d+(?:\.\d*)?")


class OllamaModelRequest(RequestModel):
    """A request for a model."""

    INERT: ClassVar[frozenset[str]] = frozenset({"keep_alive"})

    model: str | None = None
    """A model's name, with or without a tag; the first of /api/tags if it is missing."""


class OllamaRequest(OllamaModelRequest):
    """The common fields of chats and completions."""

    INERT: ClassVar[frozenset[str]] = frozenset()

    stream: bool = True
    """Whether the answer comes in lines, as it is made."""
    format: Any = None
    """The form of the answer: `json` for any JSON object, or a JSON schema that it validates against."""
    options: Options = Field(default_factory=Options)
    keep_alive: float | str | None = None
    """Models stay loaded. Without a prompt, 0 is answered as unloading, and all else as loading."""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """Whether the model thinks before it answers; one that can does by default."""
    truncate: bool = True
    """Whether a prompt that is too long is cut."""
    shift: bool | None = None
    """Whether to go on when the context is full, up to `num_predict`, with its oldest tokens dropped.
    Without this, `engine.context_shift` counts."""
    logprobs: bool = False
    """Whether to tell every token's log probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    """The number of most likely tokens whose log probabilities are told as well."""
    user: str | None = None
    """The user who sent the request, which is not Ollama's. Slots are shared fairly among users."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """vLLM's: lower ones get a slot first."""
    cache_salt: CacheSalt | None = None
    """vLLM's: cached prefixes are shared only with requests that send the same."""
    sse_ping_interval: PingInterval | None = None
    """llama-server's: seconds without news after which a stream sends a line without text; 0 and -1: never.
    Without it, `ingress.sse_ping_interval_s` counts."""

    @field_validator("format")
    @classmethod
    def _check_format(cls, value: object) -> object:
        if value in (None, "", "json") or isinstance(value, dict):
            return value or None
        raise InvalidRequestError('format: expected "json" or a valid JSON Schema object', "format")

    @field_validator("keep_alive")
    @classmethod
    def _check_duration(cls, value: object) -> object:
        if isinstance(value, str) and not _DURATION.fullmatch(value):
            raise InvalidRequestError(
                f"keep_alive: {value[:100]!r} is not a duration", "keep_alive"
            )
        return value

    @property
    def unloads(self) -> bool:
        """Whether the model need not stay loaded."""
        if isinstance(self.keep_alive, str):
            return not any(float(number) for number in _NUMBER.findall(self.keep_alive))
        return self.keep_alive == 0

    @property
    def n_logprobs(self) -> int | None:
        """The number of most likely tokens to tell with each token; None: no log probabilities."""
        return self.top_logprobs if self.logprobs else None

    def schema_of_answer(self) -> dict[str, Any] | None:
        """The schema that the answer must validate against, if there is one."""
        return {"type": "object"} if self.format == "json" else self.format

    def params(self) -> dict[str, Any]:
        """OpenAI's fields of all requests."""
        most = self.options.max_tokens
        return {
            "stream": self.stream,
            "json_schema": self.schema_of_answer(),
            "max_tokens": most,
            "context_shift": self.shift if most is not None or not self.shift else None,
            "n_keep": self.options.num_keep,
            "user": self.user,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "sse_ping_interval": self.sse_ping_interval,
            **read_params(self.options, Api.OPENAI),
        }

    def as_chat(self, turns: list[Turn], tools: list[Tool], *, can_think: bool) -> TranslatedChat:
        """The request with these turns as OpenAI has it. Raises InvalidRequestError."""
        return TranslatedChat(
            turns=turns,
            tools=tools,
            logprobs=self.logprobs,
            top_logprobs=self.n_logprobs,
            chat_template_kwargs=self._template_kwargs(can_think),
            **self.params(),
        )

    def as_completion(self) -> GenerationParams:
        """The request without a chat template as OpenAI has it, all but the prompt."""
        return GenerationParams(**self.params())

    def _template_kwargs(self, can_think: bool) -> dict[str, Any]:
        """The variables for thinking, by the names that chat templates have for them."""
        if self.think is None:
            return {"enable_thinking": True} if can_think else {}
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"enable_thinking": bool(self.think), **level}


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: list[OllamaMessage] = Field(default=[])
    """The conversation. An empty one loads the model, which is loaded anyway."""
    tools: list[Tool] = Field(default=[])
    """Functions that the model may call."""

    @field_validator("tools", mode="before")
    @classmethod
    def _known_tools(cls, value: object) -> object:
        return known_tools(("function",), value)


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(
        ("width", "height", "steps"), (None, 0)
    )
    REFUSED: ClassVar[frozenset[str]] = frozenset(NEUTRAL)

    prompt: str = ""
    """Empty: the model is loaded, which it is anyway."""
    suffix: str = ""
    """The text after the answer, for models with infill tokens."""
    system: str = ""
    """The system prompt."""
    template: str = ""
    """Refused: Ollama's templates are not rendered here. `raw` takes prompts that are."""
    raw: bool = False
    """Whether the prompt is taken as it is, without the chat template."""
    context: list[Annotated[int, Field(ge=0)]] = Field(default=[])
    """The `context` of an earlier answer: the conversation so far, as tokens."""
    images: list[str] | None = None
    """Pictures in base64."""


class OllamaEmbedRequest(OllamaModelRequest):
    """POST /api/embed."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"options": (None, {})}

    input: str | list[str] | None = None
    """A text, or several."""
    truncate: bool = True
    """Whether texts that are too long are cut."""
    dimensions: int | None = None
    """The number of components that vectors keep, the first ones, with length 1 again: for models that
    are made for it."""
    user: str | None = None
    """The user who sent the texts, which is not Ollama's. The engine is shared fairly among clients."""

    @property
    def texts(self) -> list[str]:
        """The texts of `input`, one or several; none if there is no text."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []


class OllamaEmbeddingsRequest(OllamaModelRequest):
    """POST /api/embeddings."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {"options": (None, {})}

    prompt: str = ""
    """A text."""


class OllamaShowRequest(OllamaModelRequest):
    """POST /api/show, and DELETE /api/delete."""

    INERT: ClassVar[frozenset[str]] = frozenset({"keep_alive", "verbose"})

    name: str | None = None
    """The older name of `model`."""

    @property
    def wanted_name(self) -> str | None:
        """The model's name, by its new or its older field."""
        return self.name if self.model is None else self.model


class OllamaPullRequest(OllamaShowRequest):
    """POST /api/pull."""

    INERT: ClassVar[frozenset[str]] = frozenset({"insecure", "username", "password"})

    stream: bool = True
    """Whether the progress comes in lines."""


class OllamaCopyRequest(RequestModel):
    """POST /api/copy."""

    source: str
    destination: str


class CreateOptions(Options):
    """The sampling parameters of a model, and these."""

    num_ctx: Annotated[int, Field(ge=2, le=_INT_MAX)] | None = None
    """Tokens that a request may have."""


class OllamaCreateRequest(OllamaPullRequest):
    """POST /api/create."""

    INERT: ClassVar[frozenset[str]] = frozenset({"license"})
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "files": ({},),
        "messages": ([],),
        "quantize": ("",),
    }
    REFUSED: ClassVar[frozenset[str]] = frozenset(NEUTRAL)

    origin: str = Field(default="", alias="from")
    """A model that is served, or one of a hub."""
    modelfile: str = ""
    """A Modelfile, which says what the other fields do."""
    parameters: CreateOptions = Field(default_factory=CreateOptions)
    """The defaults of requests, and `num_ctx`."""
    system: str = ""
    """The system prompt of chats without one."""
    template: str = ""
    """A chat template in Jinja: Ollama's own are in Go's language."""
    adapters: dict[str, str] = Field(default={})
    """LoRA adapters of a hub by names of their own. Every request has them."""


class OllamaErrorResponse(BaseModel):
    """Every answer that is not a success."""

    error: str
