"""Texts that become vectors, in every protocol: workers read and write them, and engines compute them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import (
    CorralError,
    InvalidRequestError,
    NotSupportedError,
    TextTooLongError,
)
from serve_app.base.values.media import Medium
from serve_app.prompt.tokenizer import keep_first, keep_last
from serve_app.server.answering.preparation import refuse_huge
from serve_app.server.answering.prompts import MediaPrompt, Mixed, media_prompt, mixed_tokens
from serve_app.server.http import request_context
from serve_app.server.model_registry import ModelInfo, ServedModel, find
from serve_app.server.workers.wire import Piece
from serve_app.server.workers.worker import grant_memory

Texts = tuple[tuple[int, ...], ...]
Vectors = NDArray[np.float32]
MAX_TOKENS = 2**19
"""Tokens of all texts of one request."""
MAX_NUMBERS = 2**22
"""Numbers of all vectors of one answer."""
_ANSWER_FACTOR = 24
"""The bytes of memory for each byte of an answer's vectors: its JSON has three, and there are copies."""
_INT16_MAX = 32760.0  # what llama-server makes of the largest number with `embd_normalize: 0`


class TextCut(NamedTuple):
    """How a text is cut that has too many tokens."""

    n_most: int | None = None
    """The tokens that are kept; None for as many as the model takes."""
    side: Literal["left", "right"] = "right"
    """The side where tokens are lost."""

    def most(self, model: ModelInfo) -> int:
        """The tokens that a text of this model keeps."""
        longest = model.n_ctx_slot
        return longest if self.n_most is None else min(longest, self.n_most)

    @property
    def keep(self) -> Callable[[Sequence[int], int], Sequence[int]]:
        """Keeps so many tokens."""
        return keep_first if self.side == "right" else keep_last


@dataclass(frozen=True, slots=True)
class TextsToEmbed:
    """The prepared request for vectors."""

    model: str
    texts: Texts
    media: tuple[Medium, ...] = ()
    """The pictures and sounds in the places of MEDIUM in the texts."""
    dimensions: int | None = None
    as_base64: bool = False
    types: tuple[str, ...] = ()
    """The forms of vectors in Cohere's answer."""
    norm: int = 2
    """The kind of norm: see `normalize`. Classes are probabilities unless it is -1."""
    user: str | None = None
    name: str = ""
    """The model's name in the answer; empty for its id."""
    sent: tuple[str, ...] = ()
    """The texts that Cohere's answer repeats."""


def to_embed(
    model: ModelInfo,
    prompts: Sequence[str | Mixed | MediaPrompt],
    field: str,
    instruction: str = "",
    *,
    cut: TextCut | None = None,
) -> TextsToEmbed:
    """The prompts with the tokens that the model wants around them. The instruction comes before each one
    that is a text. Raises CorralError."""
    media: list[Medium] = []
    texts: list[tuple[int, ...]] = []
    for prompt in prompts:
        if isinstance(prompt, MediaPrompt):
            tokens, own = media_prompt(model, prompt, field)
            media += own
        elif isinstance(prompt, str):
            refuse_huge(field, len(prompt))
            tokens = model.tokenizer.encode_for_embedding(instruction + prompt)
        else:
            tokens = mixed_tokens(model, prompt, field)
        texts.append(tokens)
    return TextsToEmbed(
        model.id, check_texts(model, texts, field, cut=None if media else cut), tuple(media)
    )


def check_makes_embeddings(model: ModelInfo) -> None:
    """Raises NotSupportedError for a model that ranks or classifies instead, and InvalidRequestError for
    one that has no single vector for a text."""
    if model.tokenizer.pooling == "none":
        raise InvalidRequestError(
            "Pooling type 'none' is not OAI compatible. Please use a different pooling type, or "
            "/embedding.",
            "model",
        )
    check_has_vectors(model)


def check_has_vectors(model: ModelInfo) -> None:
    """Raises NotSupportedError for a model that ranks or classifies instead."""
    if model.tokenizer.has_classifier:
        kind, verb = (
            ("reranking", "rerank") if model.tokenizer.reranks else ("classification", "classify")
        )
        message = f"The model {model.id!r} is a {kind} model. Use /v1/{verb}."
        raise NotSupportedError(message, "model")


def check_texts(
    model: ModelInfo, texts: Sequence[tuple[int, ...]], field: str, *, cut: TextCut | None = None
) -> Texts:
    """The texts, those that are too long cut if they may be. Raises TextTooLongError, or
    InvalidRequestError for too many tokens in all."""
    if cut is not None:
        texts = [_cut_text(model, tokens, cut) for tokens in texts]
    if not all(texts):
        raise InvalidRequestError("Input content cannot be empty", field)
    longest = max(map(len, texts))
    if longest > model.n_ctx_slot:
        raise TextTooLongError(longest, model.n_ctx_slot, field)
    n_tokens, tokenizer = sum(map(len, texts)), model.tokenizer
    if n_tokens > MAX_TOKENS:
        raise InvalidRequestError(f"{field}: more than {MAX_TOKENS} tokens in all.", field)
    n_vectors = n_tokens if tokenizer.pooling == "none" else len(texts)
    if not tokenizer.has_classifier and n_vectors * tokenizer.model.n_embd > MAX_NUMBERS:
        most = MAX_NUMBERS // tokenizer.model.n_embd
        raise InvalidRequestError(
            f"{field}: {n_vectors} vectors, and an answer has at most {most} of this model.", field
        )
    return tuple(texts)


def _cut_text(model: ModelInfo, tokens: tuple[int, ...], cut: TextCut) -> tuple[int, ...]:
    """The text without the tokens of one side, but for one there that every text has."""
    most = cut.most(model)
    if len(tokens) <= most:
        return tokens
    nothing = model.tokenizer.encode_for_embedding("")
    at = slice(-1, None) if cut.side == "right" else slice(1)
    own = tokens[at] if tokens[at] == nothing[at] else ()
    kept = tuple(cut.keep(tokens, max(0, most - len(own))))
    return (kept + own if cut.side == "right" else own + kept)[:most]


@dataclass(frozen=True, slots=True)
class ComputedVectors:
    """The form of the answer with an engine's vectors for a request's texts."""

    model: str
    n_tokens: int
    dimensions: int | None = None
    """The numbers that the answer has of each vector; all by default."""
    as_base64: bool = False
    types: tuple[str, ...] = ()
    """The forms of vectors in Cohere's answer."""
    norm: int = 2
    """The kind of norm: see `normalize`."""
    lengths: tuple[int, ...] | None = None
    """The vectors of each text, as they are; None if each text has one, which is normalised."""
    total_ns: int = 0
    """The time from the request to the vectors, which Ollama's answer tells."""
    sent: tuple[str, ...] = ()
    """The texts that Cohere's answer repeats."""

    def pieces(self, vectors: Vectors) -> tuple[Piece, ...]:
        """The body for a worker that writes the answer: this as a line of JSON, and the vectors as they lie
        in memory. To copy megabytes would hold up the event loop."""
        count, length = vectors.shape
        head = msgspec.json.encode((self, count, length)) + b"\n"
        return head, np.ascontiguousarray(vectors).data.cast("B")

    @staticmethod
    def of(body: bytes) -> tuple[ComputedVectors, Vectors]:
        """The values that `pieces` were made of."""
        grant_memory(_ANSWER_FACTOR * len(body))
        end = body.index(b"\n")
        form, count, length = _HEADS.decode(body[:end])
        vectors = np.frombuffer(body, np.float32, offset=end + 1).reshape(count, length)
        return form, np.ascontiguousarray(vectors[:, : form.dimensions])


_HEADS = msgspec.json.Decoder(tuple[ComputedVectors, int, int])


def normalize(vectors: Vectors, kind: int) -> Vectors:
    """Each row divided by its norm, by llama-server's `embd_normalize`; rows of zeros stay."""
    if kind < 0:
        return vectors
    sizes = np.abs(vectors.astype(np.float64))
    if kind == 0:
        norms = sizes.max(axis=1, keepdims=True) / _INT16_MAX
    else:
        norms = (sizes**kind).sum(axis=1, keepdims=True) ** (1 / kind)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


async def compute(
    models: Mapping[str, ServedModel], body: TextsToEmbed, began: float = math.nan
) -> tuple[Piece, ...]:
    """A request's vectors, for the worker that writes the answer, and the time that they took, for a
    request that came at `began`. Raises CorralError."""
    model = find(models, body.model)
    n_tokens, vectors = await embed(model, body.texts, body.user, body.media)
    lengths = None
    if model.tokenizer.pooling == "none":
        if body.media:
            raise InvalidRequestError("Pictures need another pooling type than 'none'.", "model")
        lengths = tuple(map(len, body.texts))
    name = body.name or body.model
    total_ns = 0 if math.isnan(began) else round((time.perf_counter() - began) * 1e9)
    form = body.dimensions, body.as_base64, body.types, body.norm, lengths, total_ns, body.sent
    return ComputedVectors(name, n_tokens, *form).pieces(vectors)


async def embed(
    model: ServedModel, texts: Texts, user: str | None = None, media: tuple[Medium, ...] = ()
) -> tuple[int, Vectors]:
    """The number of tokens of texts and their media, and the texts' vectors, charged to the caller. Raises
    KeyLimitError or RateLimitError for what the caller may not, and what the engine does."""
    caller = request_context.current()
    await caller.admit(texts)
    n_tokens = sum(map(len, texts)) - len(media)
    try:
        if media:
            n_tokens += await model.engine.media_tokens([medium.size for medium in media])
        vectors = await model.engine.embed(
            texts, caller.client(user), background=caller.is_background, media=media
        )
    except CorralError:
        caller.count(model.id, {"refused": 1})
        raise
    except asyncio.CancelledError:  # the texts may have been computed, and stay charged
        caller.count(model.id, {"requests": 1, "aborted": 1, "prompt_tokens": n_tokens})
        raise
    caller.keep_charge()
    caller.count(model.id, {"requests": 1, "completed": 1, "prompt_tokens": n_tokens})
    return n_tokens, vectors
