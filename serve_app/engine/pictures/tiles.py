"""A prompt's tiles, and the tokens that take the place of its pictures and sounds.

A tile takes as many tokens of a prompt as it has embeddings: negative ones, which no vocabulary has. They
are a hash of what is seen. So all that compares tokens tells pictures apart by their content (the prefix
index, tiers, files, other replicas), and knows nothing of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, shake_128

import numpy as np
from numpy.typing import NDArray

from serve_app.engine.backends.base import Backend, Projector, Row
from serve_app.errors import DecodeError, InvalidRequestError
from serve_app.llama.vision.positions import Tile, cannot_be_used
from serve_app.types import MEDIUM, GenerationRequest, Medium

# A tile has so many at least, or its hash would be too short to tell it from others.
_LEAST_TOKENS = 4
_NEGATIVE = np.int32(-(2**31))


def _tokens_of(key: bytes, n_tokens: int) -> tuple[int, ...]:
    digest = shake_128(key).digest(4 * n_tokens)
    return tuple((np.frombuffer(digest, np.int32) | _NEGATIVE).tolist())


@dataclass(slots=True)
class PlacedTile:
    """A tile of a picture or sound, and where it stands in a prompt. Decoder thread only, once
    there."""

    start: int
    """The index of the tile's first token."""
    tile: Tile
    medium: Medium
    number: int
    """Among its medium's tiles."""
    key: bytes
    """Tells it from all others with other embeddings."""
    embeddings: NDArray[np.float32] | None = field(default=None, repr=False)
    """The embeddings, as long as they are needed."""

    @property
    def end(self) -> int:
        """The index of the token behind it."""
        return self.start + self.tile.n_tokens

    @property
    def is_ready(self) -> bool:
        """Whether its embeddings are there."""
        return self.embeddings is not None

    @property
    def is_whole(self) -> bool:
        """Whether all of its rows must be computed in one batch: each sees all others."""
        return not self.tile.causal

    def decode(self, backend: Backend, rows: Sequence[Row]) -> None:
        """Compute some of its rows, as `Backend.decode` does."""
        pictures = backend.pictures
        if self.embeddings is None or pictures is None:
            raise DecodeError("A picture was not encoded yet.")
        first = rows[0][1] - self.start
        embeddings = self.embeddings[first : first + len(rows)]
        pictures.decode(rows, embeddings, self.tile, first)


def expanded(
    request: GenerationRequest, projector: Projector, n_batch: int
) -> tuple[GenerationRequest, tuple[PlacedTile, ...]]:
    """The request with its media's tokens in the places of MEDIUM, and where their tiles stand. Raises
    InvalidRequestError for what cannot be computed, in batches of at most `n_batch` rows."""
    prompt: list[int] = []
    placed: list[PlacedTile] = []
    media = iter(request.media)
    for token in request.prompt:
        if token == MEDIUM:
            placed += _place(next(media), prompt, projector)
        else:
            prompt.append(token)
    _check(placed, len(prompt), n_batch)
    return replace(request, prompt=tuple(prompt)), tuple(placed)


def _place(medium: Medium, prompt: list[int], projector: Projector) -> list[PlacedTile]:
    placed: list[PlacedTile] = []
    for part in projector.layout(medium.size):
        if not isinstance(part, Tile):
            prompt += part
            continue
        if part.n_tokens < _LEAST_TOKENS:
            raise InvalidRequestError(cannot_be_used(medium.size), "messages")
        number = len(placed)
        said = projector.fingerprint + medium.key + number.to_bytes(4, "little")
        key = blake2b(said, digest_size=32).digest()
        placed.append(PlacedTile(len(prompt), part, medium, number, key))
        prompt += _tokens_of(key, part.n_tokens)
    return placed


def _check(placed: Sequence[PlacedTile], n_prompt: int, n_batch: int) -> None:
    if placed and placed[-1].end == n_prompt:
        raise InvalidRequestError(
            "Text must follow the last picture or sound of a prompt.", "prompt"
        )
    largest = max((one.tile.n_tokens for one in placed if not one.tile.causal), default=0)
    if largest > n_batch:
        raise InvalidRequestError(
            f"A picture has {largest} tokens, and this model computes them in one batch of "
            f"engine.n_batch ({n_batch}) at most.",
            "messages",
        )
