"""Turns bodies of OpenAI's requests into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.ingress.generation import beginnings, preparation
from serve_app.ingress.generation.preparation import Chat, Generation, PromptLength
from serve_app.ingress.generation.tokenization import refuse_unknown_tokens, tokenize_checked
from serve_app.ingress.http.json_body import parsed
from serve_app.ingress.model_registry import ModelInfo, find
from serve_app.ingress.openai.protocol import ChatCompletionRequest, CompletionRequest
from serve_app.ingress.workers.worker import Models


@dataclass(frozen=True, slots=True)
class Completion:
    """A prepared completion."""

    generation: Generation
    n_best: int | None
    """How many of a prompt's texts are given, if not all."""
    echoes: tuple[str, ...]
    """The beginning of each prompt's texts."""
    logprobs: bool


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A prepared chat completion."""

    chat: Chat
    logprobs: bool
    verbose: bool


def completion(models: Models, body: bytes) -> Completion:
    """POST /v1/completions. Raises CorralError."""
    asked = parsed(CompletionRequest, body)
    model = find(models, asked.model, beginnings.of_text(asked.prompts[0]))
    sampling = preparation.sampling(model, asked)
    prompts, n = _prompts(model, asked), asked.best_of or asked.n_answers
    return Completion(
        preparation.generation(model, asked, prompts, n, sampling, "prompt"),
        asked.n_answers if asked.best_of else None,
        tuple(_echoes(model, asked)) if asked.echo else ("",) * len(prompts),
        sampling.logprobs is not None and (asked.logprobs is not None or asked.n_probs > 0),
    )


def chat(models: Models, body: bytes) -> ChatCompletion:
    """POST /v1/chat/completions. Raises CorralError."""
    asked = parsed(ChatCompletionRequest, body)
    model = find(models, asked.model, beginnings.of_chat(asked.conversation))
    found = preparation.chat(model, asked, asked.n_answers, "messages")
    return ChatCompletion(found, asked.n_logprobs is not None, asked.verbose)


def input_tokens(models: Models, body: bytes) -> PromptLength:
    """POST /v1/chat/completions/input_tokens: how many the prompt would have. Raises CorralError."""
    asked = parsed(ChatCompletionRequest, body)
    model = find(models, asked.model, beginnings.of_chat(asked.conversation))
    return preparation.length(model, asked, "messages")


def _prompts(model: ModelInfo, asked: CompletionRequest) -> list[tuple[int, ...]]:
    if asked.suffix:
        before, after = str(asked.prompt), asked.suffix
        n_chars, encode = len(before) + len(after), model.tokenizer.encode_infill
        return [tokenize_checked(model, "prompt", n_chars, encode, before, after)]
    return [_prompt(model, prompt) for prompt in asked.prompts]


def _prompt(model: ModelInfo, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tokenize_checked(model, "prompt", len(prompt), model.tokenizer.encode, prompt)
    refuse_unknown_tokens(model, "prompt", prompt)
    return tuple(prompt)


def _echoes(model: ModelInfo, asked: CompletionRequest) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
        for prompt in asked.prompts
    ]
