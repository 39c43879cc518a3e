"""Turns bodies of Ollama's requests into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Literal

import msgspec

from serve_app.errors import InvalidRequestError, PromptTooLongError
from serve_app.ingress.generation import beginnings, preparation
from serve_app.ingress.generation.preparation import Chat
from serve_app.ingress.generation.requests import GenerationParams, TranslatedChat
from serve_app.ingress.generation.tokenization import refuse_unknown_tokens, tokenize_checked
from serve_app.ingress.http.json_body import parsed
from serve_app.ingress.model_registry import ModelInfo, find, full_name
from serve_app.ingress.ollama import messages
from serve_app.ingress.ollama.protocol import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from serve_app.ingress.workers.worker import Models
from serve_app.prompt.conversation import Turn
from serve_app.types import Medium

_NUM_KEEP = 4
"""Ollama's: so many first tokens stay when a prompt is cut."""
_ANSWERS_SHARE = 4
"""A prompt that is cut leaves one part in so many of the context to the answer."""


class OllamaLoad(msgspec.Struct, frozen=True, tag=True):
    """A request that asks for nothing but a model that is loaded, or not."""

    model: str
    """Its id."""
    name: str
    """As it was asked."""
    reason: Literal["load", "unload"]


class OllamaGeneration(msgspec.Struct, frozen=True, tag=True):
    """The prepared request for an answer."""

    name: str
    """The model's, as it was asked."""
    chat: Chat
    shows_thinking: bool
    logprobs: bool
    has_context: bool
    """Whether the answer tells the conversation's tokens."""


def chat(models: Models, body: bytes) -> OllamaGeneration | OllamaLoad:
    """POST /api/chat. Raises CorralError."""
    asked = parsed(OllamaChatRequest, body)
    turns = [message.as_turn() for message in asked.messages]
    model = find(models, asked.model, beginnings.of_chat(turns) or None)
    if not turns:
        return _load(model, asked)
    _check_thinking(model, asked)
    request = asked.as_chat(turns, asked.tools, can_think=model.tokenizer.thinks)
    try:
        found = preparation.chat(model, request, 1, "messages")
    except PromptTooLongError:
        if not asked.truncates:
            raise
        fitting = _last_turns(model, asked, request, turns)
        found = preparation.chat(model, fitting, 1, "messages")
    return _asked(model, asked, found, context=False)


def generate(models: Models, body: bytes) -> OllamaGeneration | OllamaLoad:
    """POST /api/generate. Raises CorralError."""
    asked = parsed(OllamaGenerateRequest, body)
    said = asked.context or f"{asked.system}\n{asked.prompt}"
    model = find(models, asked.model, beginnings.of_text(said) if asked.prompt else None)
    if not asked.prompt:
        return _load(model, asked)
    if asked.images and (asked.raw or asked.suffix):
        raise InvalidRequestError("Pictures go with a chat template: not raw, no suffix.", "images")
    if asked.raw and (asked.template or asked.system or asked.context):
        raise InvalidRequestError("raw mode does not support template, system, or context", "raw")
    if asked.template:
        raise InvalidRequestError(
            "template: Ollama's templates are not rendered here. Send the whole prompt, with raw: true.",
            "template",
        )
    _check_thinking(model, asked)
    if asked.suffix:
        return _asked(model, asked, _infill(model, asked), context=False)
    if asked.raw:
        encode = model.tokenizer.encode
        prompt = tokenize_checked(model, "prompt", len(asked.prompt), encode, asked.prompt)
        found = _untemplated(model, asked, asked.as_completion(), prompt, thinks=False)
        return _asked(model, asked, found, context=False)
    request = asked.as_chat(_turns(asked), [], can_think=model.tokenizer.thinks)
    prompt, media = preparation.chat_with_media(model, request, "images")
    prompt = _after_context(model, asked, prompt)
    found = _untemplated(model, asked, request, prompt, thinks=True, media=media)
    return _asked(model, asked, found, context=not media)


def _load(model: ModelInfo, asked: OllamaRequest) -> OllamaLoad:
    return OllamaLoad(model.id, _name(model, asked), "unload" if asked.unloads else "load")


def _name(model: ModelInfo, asked: OllamaRequest) -> str:
    """As it was asked, if it was."""
    return full_name(model.id) if asked.model is None else asked.model


def _asked(
    model: ModelInfo, asked: OllamaRequest, found: Chat, *, context: bool
) -> OllamaGeneration:
    shows_thinking = asked.think is not False
    return OllamaGeneration(_name(model, asked), found, shows_thinking, asked.logprobs, context)


def _check_thinking(model: ModelInfo, asked: OllamaRequest) -> None:
    """Raises InvalidRequestError, in Ollama's words, which clients look for."""
    if asked.think and not model.tokenizer.thinks:
        raise InvalidRequestError(f'"{_name(model, asked)}" does not support thinking', "think")


def _last_turns(
    model: ModelInfo,
    asked: OllamaRequest,
    request: TranslatedChat,
    turns: Sequence[Turn],
) -> TranslatedChat:
    """The request without its oldest turns, so that there is room for it and an answer: from a turn of the
    user's on, and what the system said before that. Raises PromptTooLongError if not even the last one
    fits."""
    starts = [place for place, turn in enumerate(turns) if turn.role == "user"]

    def from_(start: int) -> TranslatedChat:
        system = [turn for turn in turns[:start] if turn.role == "system"]
        return request.model_copy(update={"turns": [*system, *turns[start:]]})

    def fits(start: int) -> bool:
        try:
            return len(preparation.chat_prompt(model, from_(start))) <= _room(model, asked)
        except PromptTooLongError:
            return False

    found = bisect.bisect_left(starts, True, key=fits)
    return from_(starts[min(found, len(starts) - 1)]) if starts else request


def _room(model: ModelInfo, asked: OllamaRequest) -> int:
    """Tokens that a prompt may have that is cut."""
    for_answer = max(1, model.n_ctx_slot // _ANSWERS_SHARE)
    return model.n_ctx_slot - min(asked.options.max_tokens or for_answer, for_answer)


def _turns(asked: OllamaGenerateRequest) -> list[Turn]:
    system = [Turn("system", (asked.system,))] if asked.system else []
    return [*system, Turn("user", messages.parts(asked.prompt, asked.images))]


def _after_context(
    model: ModelInfo, asked: OllamaGenerateRequest, prompt: tuple[int, ...]
) -> tuple[int, ...]:
    """The prompt as the conversation's next turn. The tokens that begin a text are there already."""
    if not asked.context:
        return prompt
    refuse_unknown_tokens(model, "context", asked.context)
    begins = model.tokenizer.encode("")
    if begins and prompt[: len(begins)] == begins:
        prompt = prompt[len(begins) :]
    return (*asked.context, *prompt)


def _infill(model: ModelInfo, asked: OllamaGenerateRequest) -> Chat:
    if not model.tokenizer.can_infill:
        raise InvalidRequestError(f'"{_name(model, asked)}" does not support insert', "suffix")
    texts = asked.prompt, asked.suffix
    encode = model.tokenizer.encode_infill
    prompt = tokenize_checked(model, "prompt", sum(map(len, texts)), encode, *texts)
    whole = asked.model_copy(update={"truncate": False})  # its parts must stay where they are
    return _untemplated(model, whole, asked.as_completion(), prompt, thinks=False)


def _untemplated(
    model: ModelInfo,
    asked: OllamaRequest,
    params: GenerationParams,
    prompt: tuple[int, ...],
    *,
    thinks: bool,
    media: tuple[Medium, ...] = (),
) -> Chat:
    """The answer to these tokens, cut if they must and may be: not with media."""
    if not media and len(prompt) >= model.n_ctx_slot and asked.truncates:
        prompt = _cut(prompt, _room(model, asked), asked.options.num_keep)
    sampling = (
        preparation.chat_sampling(model, params, prompt)
        if isinstance(params, TranslatedChat)
        else params.sampling(model.defaults)
    )
    sampling = dataclasses.replace(sampling, logprobs=asked.n_logprobs)
    found = preparation.generation(model, params, [prompt], 1, sampling, "prompt", media)
    return Chat(found, (), thinks)


def _cut(prompt: tuple[int, ...], room: int, num_keep: int | None) -> tuple[int, ...]:
    """Its first tokens and its last ones, as Ollama cuts."""
    n_keep = min(_NUM_KEEP if num_keep is None or num_keep < 0 else num_keep, room // 2)
    return prompt[:n_keep] + prompt[len(prompt) - (room - n_keep) :]
