"""Tokenizes texts, and refuses those that cannot fit before it does. Runs in workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from serve_app.errors import InvalidRequestError, MediaError, PromptTooLongError
from serve_app.ingress.model_registry import ModelInfo
from serve_app.types import MEDIUM, Medium

MAX_TEXT_CHARS = 3 * 2**18
"""Characters of one prompt or text: llama.cpp takes some forty bytes for each while it tokenizes."""


def tokenize_checked(
    model: ModelInfo,
    field: str,
    n_chars: int,
    encode: Callable[..., tuple[int, ...]],
    *args: Any,
) -> tuple[int, ...]:
    """The tokens that `encode` makes of these arguments, which have so many characters. Raises
    PromptTooLongError for more than can fit, before they are tokenized."""
    refuse_far_too_long(model, field, n_chars)
    return encode(*args)


def refuse_far_too_long(model: ModelInfo, field: str, n_chars: int) -> None:
    """Raises PromptTooLongError for so many characters if they cannot fit, however they are tokenized, and
    InvalidRequestError for more than MAX_TEXT_CHARS."""
    n_least = model.tokenizer.least_tokens(n_chars)
    if n_least >= model.n_ctx_slot:
        raise PromptTooLongError(n_least, model.n_ctx_slot, field, exact=False)
    refuse_huge(field, n_chars)


def refuse_huge(field: str, n_chars: int) -> None:
    """Raises InvalidRequestError for more than MAX_TEXT_CHARS."""
    if n_chars > MAX_TEXT_CHARS:
        message = f"{field}: {n_chars} characters; at most {MAX_TEXT_CHARS} are tokenized at once."
        raise InvalidRequestError(message, field)


def check_medium(model: ModelInfo, is_sound: bool, field: str) -> None:
    """Raises MediaError for a kind of medium that the model has no projector for."""
    if model.media is not None:
        model.media.check(is_sound, field)
    elif is_sound:
        raise MediaError(
            "Audio input is not supported: this model has no projector for sound.", field
        )
    else:
        raise MediaError(
            "Image input is not supported: this model reads text only, as it has no projector.",
            field,
        )


def with_media(
    model: ModelInfo, prompt: tuple[int, ...], urls: Sequence[str], field: str
) -> tuple[tuple[int, ...], tuple[Medium, ...]]:
    """The prompt with MEDIUM in the place of -1 for the first picture or sound, -2 for the second and so
    on, and the media in the prompt's order. Raises InvalidRequestError, and MediaError like
    `check_medium`."""
    if not urls or model.media is None:
        return prompt, ()
    numbers = [-1 - token for token in prompt if token < 0]
    if sorted(numbers) != list(range(len(urls))):
        raise InvalidRequestError("The model's chat template does not keep pictures.", field)
    media = model.media.decode(urls, field)
    tokens = tuple(MEDIUM if token < 0 else token for token in prompt)
    return tokens, tuple(media[number] for number in numbers)


def refuse_unknown_tokens(model: ModelInfo, field: str, tokens: Iterable[int]) -> None:
    """Raises InvalidRequestError for token ids that the model does not have."""
    n_vocab = model.tokenizer.n_vocab
    if any(token not in range(n_vocab) for token in tokens):
        message = f"{field}: token ids of this model are below {n_vocab}."
        raise InvalidRequestError(message, field)
