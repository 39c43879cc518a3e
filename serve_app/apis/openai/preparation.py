"""The bodies of OpenAI's completions and chats, and how workers turn them into what the engine needs.

Source: OpenAI's API reference, "Completions" and "Chat".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, model_validator

from serve_app.base.errors import InvalidRequestError
from serve_app.base.sampling import SamplingParams
from serve_app.config.defaults import ModelDefaults
from serve_app.server.answering import preparation
from serve_app.server.answering.messages import ChatCompletionRequest
from serve_app.server.answering.preparation import (
    Chat,
    Generation,
    PromptLength,
    refuse_unknown_tokens,
    tokenize_checked,
)
from serve_app.server.answering.requests import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    GenerationParams,
    MaxTokens,
    TokenId,
)
from serve_app.server.http.sse import encode_json
from serve_app.server.model_registry import ModelInfo, Models, find

Tokens = Annotated[list[TokenId], Field(min_length=1)]
_Batch = Field(min_length=1, max_length=MAX_CHOICES)


class CompletionRequest(GenerationParams):
    """POST /v1/completions."""

    prompt: str | Tokens | Annotated[list[str], _Batch] | Annotated[list[Tokens], _Batch]
    """A text or a list of token ids, or several of either. An empty text is the model's BOS."""
    suffix: str | None = None
    """The text after the answer, for models with infill tokens."""
    echo: bool = False
    """Whether answers begin with their prompt."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """The number of answers that are made; the `n` with the highest log probability per token are given."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """How many most likely tokens to tell with every token's log probability; with `echo`, the prompt's are
    told, too, but for the first."""
    max_tokens: MaxTokens | None = 16
    """OpenAI's default, which counts where the model has none of its own; null means up to the end of the
    context."""

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        n = self.n_answers
        if self.best_of is not None and self.best_of < n:
            raise InvalidRequestError("'best_of' is less than 'n'.", "best_of")
        if self.stream and (self.best_of or n) > n:
            raise InvalidRequestError("'best_of' above 'n' cannot be streamed.", "best_of")
        if self.echo and self.suffix:
            raise InvalidRequestError("'echo' is not supported together with 'suffix'.", "echo")
        if self.suffix and not isinstance(self.prompt, str):
            raise InvalidRequestError("'suffix' needs one text as 'prompt'.", "suffix")
        if self.timings and len(self.prompts) * (self.best_of or n) > 1:
            raise InvalidRequestError("'timings' is for one answer only.", "timings")
        if len(self.prompts) * (self.best_of or n) > MAX_CHOICES:
            raise InvalidRequestError(f"More than {MAX_CHOICES} answers are asked for.", "prompt")
        return self

    def sampling(self, defaults: ModelDefaults) -> SamplingParams:
        """The engine's parameters: see GenerationParams."""
        of_prompt = self.echo and self.logprobs is not None
        if "max_tokens" not in self.model_fields_set and defaults.max_tokens is None:
            defaults = dataclasses.replace(defaults, max_tokens=self.max_tokens)
        sampling = super().sampling(defaults)
        return dataclasses.replace(sampling, prompt_logprobs=of_prompt)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens: see GenerationParams. A null is a -1 here."""
        if self.n_predict is not None or "max_tokens" not in self.model_fields_set:
            return self.n_predict
        return -1 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompt, or the prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def n_logprobs(self) -> int | None:
        """The number of likely tokens to tell. Log probabilities also find the best of several answers."""
        found = self.logprobs if self.logprobs is not None else super().n_logprobs
        return 0 if found is None and self.best_of is not None else found


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A prepared completion."""

    generation: Generation
    n_best: int | None
    """How many of a prompt's texts are given, if not all."""
    echoes: tuple[str, ...]
    """The beginning of each prompt's texts."""
    logprobs: bool


def completion(models: Models, request: CompletionRequest) -> PreparedCompletion:
    """POST /v1/completions. Raises CorralError."""
    model = find(models, request.model)
    sampling = preparation.sampling(model, request)
    prompts, n = _prompts(model, request), request.best_of or request.n_answers
    return PreparedCompletion(
        preparation.make_generation(model, request, prompts, n, sampling, "prompt"),
        request.n_answers if request.best_of else None,
        tuple(_echoes(model, request)) if request.echo else ("",) * len(prompts),
        sampling.logprobs is not None and (request.logprobs is not None or request.n_probs > 0),
    )


def chat(models: Models, request: ChatCompletionRequest) -> Chat:
    """POST /v1/chat/completions. Raises CorralError."""
    model = find(models, request.model)
    _check_messages(request)
    return preparation.prepare_chat(model, request, request.n_answers, "messages")


def input_tokens(models: Models, request: ChatCompletionRequest) -> PromptLength:
    """POST /v1/chat/completions/input_tokens: how many the prompt would have. Raises CorralError."""
    model = find(models, request.model)
    _check_messages(request)
    return preparation.length(model, request, "messages")


def _check_messages(request: ChatCompletionRequest) -> None:
    if not request.messages:
        raise InvalidRequestError("'messages' is empty. Send at least one message.", "messages")


def render_chat(models: Models, request: ChatCompletionRequest) -> bytes:
    """POST /v1/chat/completions/render: the prompt's tokens, as JSON. Raises CorralError."""
    model = find(models, request.model)
    _check_messages(request)
    tokens = preparation.rendered_tokens(model, request, "messages")
    return encode_json(preparation.describe_prompt(tokens))


def render_completion(models: Models, request: CompletionRequest) -> bytes:
    """POST /v1/completions/render: each prompt's tokens, as JSON. Raises CorralError."""
    prompts = _prompts(find(models, request.model), request)
    return encode_json([preparation.describe_prompt(tokens) for tokens in prompts])


def _prompts(model: ModelInfo, request: CompletionRequest) -> list[tuple[int, ...]]:
    if request.suffix:
        before, after = str(request.prompt), request.suffix
        n_chars, encode = len(before) + len(after), model.tokenizer.encode_infill
        return [tokenize_checked(model, "prompt", n_chars, encode, before, after)]
    return [_prompt(model, prompt) for prompt in request.prompts]


def _prompt(model: ModelInfo, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tokenize_checked(model, "prompt", len(prompt), model.tokenizer.encode, prompt)
    refuse_unknown_tokens(model, "prompt", prompt)
    return tuple(prompt)


def _echoes(model: ModelInfo, request: CompletionRequest) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
        for prompt in request.prompts
    ]
