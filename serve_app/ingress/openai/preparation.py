"""Turns bodies of OpenAI's requests into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.ingress.generation import preparation
from serve_app.ingress.generation.preparation import (
    Chat,
    Generation,
    PromptLength,
    refuse_unknown_tokens,
    tokenize_checked,
)
from serve_app.ingress.http.request_model import parsed
from serve_app.ingress.model_registry import ModelInfo, Models, find
from serve_app.ingress.openai.protocol import ChatCompletionRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class PreparedCompletion:
    """A prepared completion."""

    generation: Generation
    n_best: int | None
    """How many of a prompt's texts are given, if not all."""
    echoes: tuple[str, ...]
    """The beginning of each prompt's texts."""
    logprobs: bool


@dataclass(frozen=True, slots=True)
class PreparedChatCompletion:
    """A prepared chat completion."""

    chat: Chat
    logprobs: bool
    verbose: bool


def completion(models: Models, body: bytes) -> PreparedCompletion:
    """POST /v1/completions. Raises CorralError."""
    request = parsed(CompletionRequest, body)
    model = find(models, request.model, preparation.text_beginning(request.prompts[0]))
    sampling = preparation.sampling(model, request)
    prompts, n = _prompts(model, request), request.best_of or request.n_answers
    return PreparedCompletion(
        preparation.generation(model, request, prompts, n, sampling, "prompt"),
        request.n_answers if request.best_of else None,
        tuple(_echoes(model, request)) if request.echo else ("",) * len(prompts),
        sampling.logprobs is not None and (request.logprobs is not None or request.n_probs > 0),
    )


def chat(models: Models, body: bytes) -> PreparedChatCompletion:
    """POST /v1/chat/completions. Raises CorralError."""
    request = parsed(ChatCompletionRequest, body)
    model = find(models, request.model, preparation.chat_beginning(request.conversation))
    found = preparation.chat(model, request, request.n_answers, "messages")
    return PreparedChatCompletion(found, request.n_logprobs is not None, request.verbose)


def input_tokens(models: Models, body: bytes) -> PromptLength:
    """POST /v1/chat/completions/input_tokens: how many the prompt would have. Raises CorralError."""
    request = parsed(ChatCompletionRequest, body)
    model = find(models, request.model, preparation.chat_beginning(request.conversation))
    return preparation.length(model, request, "messages")


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
