"""The types of llama-server's own requests.

Source: llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serve_app.config.defaults import ModelDefaults
from serve_app.errors import InvalidRequestError
from serve_app.ingress.http.request_model import RequestModel, name_what_is_taken
from serve_app.ingress.openai.protocol import MAX_CHOICES, MAX_LOGPROBS, GenerationParams, Text
from serve_app.sampling import SamplingParams

TokenId = Annotated[int, Field(ge=0)]
Mixed = list[TokenId | Text]
"""Token ids and texts, side by side."""
Bias = Annotated[float, Field(ge=-1000, le=1000, allow_inf_nan=False)] | Literal[False]


def several(prompt: str | list[Mixed | Text | TokenId]) -> list[str | list[int | str]]:
    """One prompt, or several: a list of texts only, or with a list in it, is of several."""
    if isinstance(prompt, str):
        return [prompt]
    if any(isinstance(one, list) for one in prompt):
        return [[one] if isinstance(one, int) else one for one in prompt]
    if all(isinstance(one, str) for one in prompt):
        return [one for one in prompt if isinstance(one, str)]
    return [[one for one in prompt if not isinstance(one, list)]]


def plain(prompt: object) -> object:
    """The prompt with texts where llama-server's clients may send objects, as `{"prompt_string": "Hello"}`
    and `{"content": [{"type": "text", "text": "Hello"}]}`. Raises InvalidRequestError for pictures."""
    if isinstance(prompt, list):
        return [one if isinstance(one, int | str) else plain(one) for one in prompt]
    if not isinstance(prompt, dict):
        return prompt
    parts = prompt.get("content")
    if prompt.get("multimodal_data") or (isinstance(parts, list) and not all(map(_is_text, parts))):
        raise InvalidRequestError("Image input is not supported: these models read text.", "prompt")
    if isinstance(parts, list):
        return "".join(part["text"] for part in parts)
    return prompt.get("prompt_string", prompt)


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _is_token(key: object) -> bool:
    return isinstance(key, str) and key.isdecimal()


def _describe(schema: dict[str, Any], model: type[Any]) -> None:
    """`token_bias` is a second form of `logit_bias`, and not a name of its own."""
    name_what_is_taken(schema, model)
    pairs = schema["properties"].pop("token_bias")
    schema["properties"]["logit_bias"]["anyOf"] += pairs["anyOf"]


class LlamaParams(GenerationParams):
    """What `/completion` and `/infill` share."""

    model_config = ConfigDict(json_schema_extra=_describe)

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tfs_z": (None, 1),
        "penalize_nl": (None, False),
        "n_cache_reuse": (None, 0),
        "lora": (None, []),
    }
    REFUSED: ClassVar[frozenset[str]] = frozenset({"lora"})

    n_predict: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Most tokens to generate; -1 for all that the context has room for, 0 to only compute the prompt."""
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Answers to every prompt."""
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    """How many most likely tokens to tell with every token's log probability; 0 for neither."""
    return_tokens: bool = False
    """Whether to give the generated token ids."""
    response_fields: list[str] | None = None
    """Only these fields of the answer; `a/b` is the field b of a, put beside the others."""
    token_bias: list[tuple[TokenId | Text, Bias]] | None = Field(default=None, exclude=True)
    """`logit_bias` in llama-server's form: pairs of a token, or of a text's tokens, and a value; false bans
    it."""

    @model_validator(mode="before")
    @classmethod
    def _bias_in_pairs(cls, data: Any) -> Any:
        if isinstance(data, dict) and "token_bias" in data:
            raise InvalidRequestError("Unknown parameter: 'token_bias'.", "token_bias")
        bias = data.get("logit_bias") if isinstance(data, dict) else None
        if isinstance(bias, dict) and not all(_is_token(key) for key in bias):
            bias = [[int(key) if _is_token(key) else key, value] for key, value in bias.items()]
        if isinstance(bias, list):
            data = {**data, "token_bias": bias}
            del data["logit_bias"]
        return data

    @field_validator("response_fields")
    @classmethod
    def _no_fields(cls, value: list[str] | None) -> list[str] | None:
        return value or None

    @field_validator("stop", mode="before")
    @classmethod
    def _no_stop(cls, value: object) -> object:
        return None if value == [] else value

    @field_validator("grammar", mode="before")
    @classmethod
    def _no_grammar(cls, value: object) -> object:
        return None if value == "" else value

    @property
    def n_logprobs(self) -> int | None:
        """See GenerationParams."""
        return self.n_probs or None

    @property
    def n_answers(self) -> int:
        """To every prompt."""
        return self.n_cmpl or self.n or 1

    def llama_sampling(self, defaults: ModelDefaults) -> SamplingParams:
        """The engine's parameters. Raises InvalidRequestError."""
        most = self.max_tokens if self.n_predict is None else self.n_predict
        if most is not None and most < 0:
            most, defaults = None, dataclasses.replace(defaults, max_tokens=None)
        return self.sampling(most, defaults)


class LlamaCompletionRequest(LlamaParams):
    """POST /completion."""

    prompt: Text | list[Mixed | Text | TokenId]
    """A text, or token ids and texts mixed; or several of either."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _plain(cls, value: object) -> object:
        return plain(value)

    @model_validator(mode="after")
    def _check_prompts(self) -> LlamaCompletionRequest:
        if not self.prompts or not all(self.prompts):
            raise InvalidRequestError("The prompt is empty.", "prompt")
        n = len(self.prompts) * self.n_answers
        if n > MAX_CHOICES:
            raise InvalidRequestError(f"More than {MAX_CHOICES} answers are asked for.", "prompt")
        return self

    @property
    def prompts(self) -> list[str | list[int | str]]:
        """The prompt, or the prompts."""
        return several(self.prompt)

    @property
    def is_batch(self) -> bool:
        """Whether the answer is a list."""
        several = isinstance(self.prompt, list) and any(
            isinstance(one, list) for one in self.prompt
        )
        return several or len(self.prompts) * self.n_answers > 1


class InfillFile(BaseModel):
    """One of `input_extra`. Editors send more about it."""

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
    """More text before the answer."""
    input_extra: list[InfillFile] | None = None
    """Other files that help, the most important one last: of all that does not fit, the beginning is left
    out."""


class TokenizeRequest(RequestModel):
    """POST /tokenize."""

    content: str
    add_special: bool = False
    """Whether to begin with BOS, if the model wants it."""
    parse_special: bool = True
    """Whether control tokens written out in the text are those."""
    with_pieces: bool = False
    """Whether to give each token's text, or its bytes if they are none."""
    model: str | None = None


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class SlotRequest(RequestModel):
    """POST /slots/{id_slot}."""

    filename: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """In `engine.slot_folder`; to save and to restore."""
    model: str | None = None


class LoraAdapter(RequestModel):
    """One entry of POST /lora-adapters."""

    id: int
    scale: float
