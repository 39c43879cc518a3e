"""The types of llama-server's own requests.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from serve_app.base.errors import InvalidRequestError
from serve_app.config.sources import AdapterConfig
from serve_app.server.answering.messages import ChatCompletionRequest
from serve_app.server.answering.prompts import MediaPrompt, Prompt, plain, several
from serve_app.server.answering.requests import MAX_CHOICES, GenerationParams, TokenId
from serve_app.server.http.request_model import AnyMember, ModelledRequest, RequestModel

MAX_TRIGGER_CHARS = 1024
_TOKEN, _WORD = range(2)


class GrammarTrigger(BaseModel):
    """A trigger in `grammar_triggers`."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    type: Annotated[int, Field(ge=0, le=3)]
    """0: a token, 1: a text. Regular expressions, which are 2 and 3 at llama-server, are refused."""
    value: Annotated[str, Field(min_length=1, max_length=MAX_TRIGGER_CHARS)]
    token: TokenId | None = None
    """The id of a trigger that is a token."""

    @model_validator(mode="after")
    def _check(self) -> GrammarTrigger:
        if self.type == _TOKEN and self.token is None:
            raise ValueError("a trigger of type 0 needs its 'token'")
        if self.type > _WORD:
            raise ValueError("a trigger that is a regular expression is not supported: send a text")
        return self


class LlamaParams(GenerationParams):
    """The common fields of `/completion` and `/infill`."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationParams.NEUTRAL,
        "tfs_z": (None, 1),
        "penalize_nl": (None, False),
    }

    return_tokens: bool = False
    """Whether to give the generated token ids."""
    response_fields: Annotated[list[str], Field(max_length=256)] | None = None
    """The only fields of the answer; `a/b` is the field b of a, put beside the others."""
    grammar_lazy: bool = False
    """Whether the text is free until one of `grammar_triggers` appears, with which the grammar begins."""
    grammar_triggers: Annotated[tuple[GrammarTrigger, ...], Field(max_length=64)] = ()
    """Tokens or texts."""
    preserved_tokens: Annotated[
        tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=64)
    ] = ()
    """Control tokens that are told as text."""

    @model_validator(mode="after")
    def _check_triggers(self) -> Self:
        if self.grammar_lazy and not self.grammar_triggers:
            raise InvalidRequestError("no triggers set for lazy grammar!", "grammar_triggers")
        return self

    @field_validator("stop", "grammar", "response_fields", mode="before")
    @classmethod
    def _empty_is_missing(cls, value: object) -> object:
        return None if value in ("", []) else value


class LlamaCompletionRequest(LlamaParams):
    """POST /completion."""

    prompt: Prompt
    """A text, or token ids and texts mixed; or several of either. An empty text is a model's BOS."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _plain(cls, value: object) -> object:
        prompt = plain(value)
        if isinstance(prompt, list) and any(isinstance(part, dict) for part in prompt):
            raise InvalidRequestError(
                "Image input is not supported here. Send one prompt with 'multimodal_data'.",
                "prompt",
            )
        return prompt

    @model_validator(mode="after")
    def _check_prompts(self) -> LlamaCompletionRequest:
        if not self.prompts:
            raise InvalidRequestError("The prompt is empty.", "prompt")
        n = len(self.prompts) * self.n_answers
        if n > MAX_CHOICES:
            raise InvalidRequestError(f"More than {MAX_CHOICES} answers are asked for.", "prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int | str]]:
        """The prompt, or the prompts."""
        if isinstance(self.prompt, MediaPrompt):
            return [self.prompt.prompt_string]
        return [one for one in several(self.prompt) if not isinstance(one, MediaPrompt)]

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        several = isinstance(self.prompt, list) and any(
            isinstance(one, list) for one in self.prompt
        )
        return several or len(self.prompts) * self.n_answers > 1


class InfillFile(BaseModel):
    """A file in `input_extra`. Editors send more about it."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    text: str
    filename: str = "tmp"
    """Shown to models that have a token for it."""


class InfillRequest(LlamaParams):
    """POST /infill."""

    input_prefix: str
    """The text before."""
    input_suffix: str
    """The text after."""
    prompt: str = ""
    """Text that also comes before the answer."""
    input_extra: list[InfillFile] | None = None
    """Other files that help, the most important one last: of all that does not fit, the beginning is left
    out."""


class TokenizeRequest(ModelledRequest):
    """POST /tokenize in llama-server's form."""

    content: str
    add_special: bool = False
    """Whether to begin with BOS, if the model wants it."""
    parse_special: bool = True
    """Whether control tokens written out in the text are those."""
    with_pieces: bool = False
    """Whether to give each token's text, or its bytes if they are none."""


class TokenizePrompt(ModelledRequest):
    """POST /tokenize in vLLM's form, of a text."""

    prompt: str
    add_special_tokens: bool = True
    """Whether to begin with BOS, if the model wants it."""
    return_token_strs: bool = False
    """Whether to give each token as the vocabulary has it."""


class TokenizeChat(ChatCompletionRequest):
    """POST /tokenize in vLLM's form, of a chat: the prompt that it would be answered from."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ChatCompletionRequest.NEUTRAL,
        "add_special_tokens": (None, False),
        "mm_processor_kwargs": (None, {}),
    }

    return_token_strs: bool = False
    """Whether to give each token as the vocabulary has it."""


def _form(body: Any) -> str:
    fields = body if isinstance(body, dict) else {}
    named = (field for field in ("content", "messages", "prompt") if field in fields)
    return f"by {next(named, 'content')}"


AnyTokenizeRequest = Annotated[
    Annotated[TokenizeRequest, Tag("by content")]
    | Annotated[TokenizePrompt, Tag("by prompt")]
    | Annotated[TokenizeChat, Tag("by messages")],
    Discriminator(_form),
    AnyMember,
]
"""llama-server's form or vLLM's, by the field that has what is to be tokenized."""


class DetokenizeRequest(ModelledRequest):
    """POST /detokenize."""

    tokens: list[TokenId]


class SlotRequest(ModelledRequest):
    """POST /slots/{id_slot}."""

    filename: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """The file in `engine.slot_folder`, to save and to restore."""


class ModelRequest(RequestModel):
    """POST /models/load and /models/unload."""

    model: str


class PropsRequest(RequestModel):
    """POST /props: llama-server has none yet that can be changed."""


class AdapterChange(ModelledRequest):
    """POST /lora-adapters that loads an adapter or unloads one."""

    load: AdapterConfig | None = None
    """An adapter as in the configuration."""
    unload: str | None = None
    """The name of one that was loaded so."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.load is None) is (self.unload is None):
            raise ValueError("give load or unload")
        return self


class LoraAdapter(RequestModel):
    """An entry of llama-server's POST /lora-adapters."""

    id: int
    scale: float
