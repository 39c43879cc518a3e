"""Prompts made of texts, without holding others up, and checked before anything is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from serve_app.errors import InvalidRequestError, PromptTooLongError
from serve_app.ingress.model_registry import ServedModel
from serve_app.ingress.openai.protocol import GenerationParams
from serve_app.sampling import SamplingParams

Result = TypeVar("Result")

# Longer texts are tokenized on a thread, so that other requests' events are not held up.
_INLINE_CHARS = 4096


async def sampling_of(body: GenerationParams, make: Callable[[], SamplingParams]) -> SamplingParams:
    """What `make` makes of the request: on a thread, if a grammar is to be checked."""
    return await asyncio.to_thread(make) if body.is_constrained else make()


async def tokenize_checked(
    model: ServedModel, field: str, n_chars: int, encode: Callable[..., tuple[int, ...]], *args: Any
) -> tuple[int, ...]:
    """The tokens that `encode` makes of these arguments, which have so many characters. Raises
    PromptTooLongError, before it tokenizes, if they cannot fit."""
    refuse_far_too_long(model, field, n_chars)
    return await in_thread_if_long(n_chars, encode, *args)


def refuse_far_too_long(model: ServedModel, field: str, n_chars: int) -> None:
    """Raises PromptTooLongError for so many characters if they cannot fit, however they are tokenized."""
    n_least = model.tokenizer.least_tokens(n_chars)
    if n_least >= model.n_ctx_slot:
        raise PromptTooLongError(n_least, model.n_ctx_slot, field, exact=False)


def refuse_unknown_tokens(model: ServedModel, field: str, tokens: Iterable[int]) -> None:
    """Raises InvalidRequestError for token ids that the model does not have."""
    n_vocab = model.tokenizer.n_vocab
    if any(token not in range(n_vocab) for token in tokens):
        message = f"{field}: token ids of this model are below {n_vocab}."
        raise InvalidRequestError(message, field)


async def in_thread_if_long(n_chars: int, encode: Callable[..., Result], *args: Any) -> Result:
    """What `encode` makes of these arguments, which have so many characters: on a thread, if these are
    many."""
    if n_chars <= _INLINE_CHARS:
        return encode(*args)
    return await asyncio.to_thread(encode, *args)
