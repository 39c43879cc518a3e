"""Turns bodies of Ollama's requests into what the engine and the answer need. Runs in workers."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from serve_app.apis.ollama import modelfile
from serve_app.apis.ollama.protocol import (
    OllamaChatRequest,
    OllamaCopyRequest,
    OllamaCreateRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaRequest,
    OllamaShowRequest,
    parts,
)
from serve_app.base.errors import InvalidRequestError, PromptTooLongError
from serve_app.base.values.media import Medium
from serve_app.prompt.conversation import Turn
from serve_app.server.answering import preparation
from serve_app.server.answering.preparation import Chat, refuse_unknown_tokens, tokenize_checked
from serve_app.server.answering.requests import GenerationParams, TranslatedChat
from serve_app.server.answering.vectors import (
    ComputedVectors,
    TextCut,
    TextsToEmbed,
    check_makes_embeddings,
    normalize,
    to_embed,
)
from serve_app.server.http.request_model import parse_body
from serve_app.server.http.sse import encode_json
from serve_app.server.model_registry import ModelInfo, Models, find, full_name

_NUM_KEEP = 4
"""Ollama's: so many first tokens stay when a prompt is cut."""
_ANSWERS_SHARE = 4
"""A prompt that is cut leaves one part in so many of the context to the answer."""


class OllamaLoad(msgspec.Struct, frozen=True, tag=True):
    """A request that asks for nothing but a model that is loaded, or not."""

    model: str
    """The model's id."""
    name: str
    """The model's name in the request."""
    reason: Literal["load", "unload"]


class PreparedOllamaAnswer(msgspec.Struct, frozen=True, tag=True):
    """The prepared request for an answer."""

    name: str
    """The model's name in the request."""
    chat: Chat
    shows_thinking: bool
    has_context: bool
    """Whether the answer tells the conversation's tokens."""


def prepare_chat(models: Models, request: OllamaChatRequest) -> PreparedOllamaAnswer | OllamaLoad:
    """POST /api/chat. Raises CorralError."""
    turns = [message.as_turn() for message in request.messages]
    model = find(models, request.model)
    if not turns:
        return _load_order(model, request)
    _check_thinking(model, request)
    translated = request.as_chat(turns, request.tools, can_think=model.tokenizer.thinks)
    try:
        prepared = preparation.prepare_chat(model, translated, 1, "messages")
    except PromptTooLongError:
        if not request.truncate:
            raise
        fitting = _last_turns(model, request, translated, turns)
        prepared = preparation.prepare_chat(model, fitting, 1, "messages")
    return _prepare_answer(model, request, prepared, context=False)


def generate(models: Models, request: OllamaGenerateRequest) -> PreparedOllamaAnswer | OllamaLoad:
    """POST /api/generate. Raises CorralError."""
    model = find(models, request.model)
    if not request.prompt:
        return _load_order(model, request)
    if request.images and (request.raw or request.suffix):
        raise InvalidRequestError("Pictures go with a chat template: not raw, no suffix.", "images")
    if request.raw and (request.template or request.system or request.context):
        raise InvalidRequestError("raw mode does not support template, system, or context", "raw")
    if request.template:
        raise InvalidRequestError(
            "template: Ollama's templates are not rendered here. Send the whole prompt, with raw: true.",
            "template",
        )
    _check_thinking(model, request)
    if request.suffix:
        return _prepare_answer(model, request, _infill(model, request), context=False)
    if request.raw:
        encode = model.tokenizer.encode
        prompt = tokenize_checked(model, "prompt", len(request.prompt), encode, request.prompt)
        prepared = _chat_of_tokens(model, request, request.as_completion(), prompt, thinks=False)
        return _prepare_answer(model, request, prepared, context=False)
    translated = request.as_chat(_turns(request), [], can_think=model.tokenizer.thinks)
    prompt, media = preparation.chat_with_media(model, translated, "images")
    prompt = _after_context(model, request, prompt)
    prepared = _chat_of_tokens(model, request, translated, prompt, thinks=True, media=media)
    return _prepare_answer(model, request, prepared, context=not media)


def _load_order(model: ModelInfo, request: OllamaRequest) -> OllamaLoad:
    return OllamaLoad(model.id, _name(model, request), "unload" if request.unloads else "load")


def _name(model: ModelInfo, request: OllamaRequest) -> str:
    """The model's name in the request, or its full name if the request has none."""
    return full_name(model.id) if request.model is None else request.model


def _prepare_answer(
    model: ModelInfo, request: OllamaRequest, prepared: Chat, *, context: bool
) -> PreparedOllamaAnswer:
    shows_thinking = request.think is not False
    return PreparedOllamaAnswer(_name(model, request), prepared, shows_thinking, context)


def _check_thinking(model: ModelInfo, request: OllamaRequest) -> None:
    """Raises InvalidRequestError, in Ollama's words, which clients look for."""
    if request.think and not model.tokenizer.thinks:
        raise InvalidRequestError(f'"{_name(model, request)}" does not support thinking', "think")


def _last_turns(
    model: ModelInfo, request: OllamaRequest, translated: TranslatedChat, turns: Sequence[Turn]
) -> TranslatedChat:
    """The request without its oldest turns, so that there is room for it and an answer. It begins with a
    turn of the user's, behind what the system said before that. Raises PromptTooLongError if not even the
    last one fits."""
    starts = [place for place, turn in enumerate(turns) if turn.role == "user"]

    def from_(start: int) -> TranslatedChat:
        system = [turn for turn in turns[:start] if turn.role == "system"]
        return translated.model_copy(update={"turns": [*system, *turns[start:]]})

    def fits(start: int) -> bool:
        try:
            return len(preparation.chat_prompt(model, from_(start))) <= _room(model, request)
        except PromptTooLongError:
            return False

    first = bisect.bisect_left(starts, True, key=fits)
    return from_(starts[min(first, len(starts) - 1)]) if starts else translated


def _room(model: ModelInfo, request: OllamaRequest) -> int:
    """Tokens that a prompt may have that is cut."""
    for_answer = max(1, model.n_ctx_slot // _ANSWERS_SHARE)
    return model.n_ctx_slot - min(request.options.max_tokens or for_answer, for_answer)


def _turns(request: OllamaGenerateRequest) -> list[Turn]:
    system = [Turn("system", (request.system,))] if request.system else []
    return [*system, Turn("user", parts(request.prompt, request.images))]


def _after_context(
    model: ModelInfo, request: OllamaGenerateRequest, prompt: tuple[int, ...]
) -> tuple[int, ...]:
    """The prompt as the conversation's next turn. The tokens that begin a text are there already."""
    if not request.context:
        return prompt
    refuse_unknown_tokens(model, "context", request.context)
    begins = model.tokenizer.encode("")
    if begins and prompt[: len(begins)] == begins:
        prompt = prompt[len(begins) :]
    return (*request.context, *prompt)


def _infill(model: ModelInfo, request: OllamaGenerateRequest) -> Chat:
    if not model.tokenizer.can_infill:
        raise InvalidRequestError(f'"{_name(model, request)}" does not support insert', "suffix")
    texts = request.prompt, request.suffix
    encode = model.tokenizer.encode_infill
    prompt = tokenize_checked(model, "prompt", sum(map(len, texts)), encode, *texts)
    whole = request.model_copy(update={"truncate": False})  # its parts must stay where they are
    return _chat_of_tokens(model, whole, request.as_completion(), prompt, thinks=False)


def _chat_of_tokens(
    model: ModelInfo,
    request: OllamaRequest,
    params: GenerationParams,
    prompt: tuple[int, ...],
    *,
    thinks: bool,
    media: tuple[Medium, ...] = (),
) -> Chat:
    """The answer to these tokens, cut if they must and may be: not with media."""
    if not media and len(prompt) >= model.n_ctx_slot and request.truncate:
        prompt = _cut(prompt, _room(model, request), request.options.num_keep)
    sampling = (
        preparation.chat_sampling(model, params, prompt)
        if isinstance(params, TranslatedChat)
        else preparation.sampling(model, params)
    )
    sampling = dataclasses.replace(sampling, logprobs=request.n_logprobs)
    generation = preparation.make_generation(model, params, [prompt], 1, sampling, "prompt", media)
    return Chat(generation, (), thinks)


def _cut(prompt: tuple[int, ...], room: int, num_keep: int | None) -> tuple[int, ...]:
    """The first and the last tokens of a prompt, as Ollama cuts it."""
    n_keep = min(_NUM_KEEP if num_keep is None or num_keep < 0 else num_keep, room // 2)
    return prompt[:n_keep] + prompt[len(prompt) - (room - n_keep) :]


def embed(models: Models, request: OllamaEmbedRequest) -> TextsToEmbed:
    """POST /api/embed. Raises CorralError."""
    model = find(models, request.model)
    cut = TextCut() if request.truncate else None
    made = _to_embed(model, request.model, request.texts, "input", cut)
    dimensions = max(0, request.dimensions or 0) or None  # as in Ollama, those below 1 are all
    return dataclasses.replace(made, dimensions=dimensions, user=request.user)


def embed_prompt(models: Models, request: OllamaEmbeddingsRequest) -> TextsToEmbed:
    """POST /api/embeddings. Raises CorralError."""
    model = find(models, request.model)
    texts = [request.prompt] if request.prompt else []
    return _to_embed(model, request.model, texts, "prompt", TextCut())


def _to_embed(
    model: ModelInfo, name: str | None, texts: list[str], field: str, cut: TextCut | None
) -> TextsToEmbed:
    """No texts load the model, which is loaded anyway."""
    check_makes_embeddings(model)
    made = to_embed(model, texts, field, cut=cut) if texts else TextsToEmbed(model.id, ())
    return dataclasses.replace(made, name=name or full_name(model.id))


class ModelChange(msgspec.Struct, frozen=True):
    """A request to add, copy or remove a model."""

    name: str
    origin: str = ""
    """The name of the model that it is made from."""
    sections: dict[str, Any] = {}
    """The changed parts of its entry in the configuration."""
    in_lines: bool = True


def pull(models: Models, request: OllamaPullRequest) -> ModelChange:
    """POST /api/pull. Raises InvalidRequestError."""
    return ModelChange(_require_name(request.wanted_name), in_lines=request.stream)


def copy(models: Models, request: OllamaCopyRequest) -> ModelChange:
    """POST /api/copy. Raises InvalidRequestError."""
    return ModelChange(_require_name(request.destination), _require_name(request.source))


def delete(models: Models, request: OllamaShowRequest) -> ModelChange:
    """DELETE /api/delete. Raises InvalidRequestError."""
    return ModelChange(_require_name(request.wanted_name))


def create(models: Models, request: OllamaCreateRequest) -> ModelChange:
    """POST /api/create. Raises InvalidRequestError."""
    name, in_lines = _require_name(request.wanted_name), request.stream
    if request.modelfile:
        fields = modelfile.fields_of(request.modelfile)
        request = parse_body(OllamaCreateRequest, encode_json(fields))
    if not request.origin:
        raise InvalidRequestError("Say what the model is made from: `from`, or FROM.", "from")
    return ModelChange(name, request.origin, modelfile.changes_of(request), in_lines)


def _require_name(name: str | None) -> str:
    if not name:
        raise InvalidRequestError("Name a model.", "model")
    return name


def several(models: Models, body: bytes) -> bytes:
    """The answer to POST /api/embed, as JSON. The body is of `ComputedVectors.pieces`."""
    result, vectors = ComputedVectors.of(body)
    return encode_json(
        {
            "model": result.model,
            "embeddings": normalize(vectors, 2),
            "total_duration": result.total_ns,
            "load_duration": 0,
            "prompt_eval_count": result.n_tokens,
        }
    )


def single(models: Models, body: bytes) -> bytes:
    """The answer to POST /api/embeddings, as JSON. The body is of `ComputedVectors.pieces`. The vector
    stays as the model made it."""
    _, vectors = ComputedVectors.of(body)
    return encode_json({"embedding": vectors[0]})
