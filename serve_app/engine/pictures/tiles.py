"""A prompt's tiles, and the tokens that take the place of its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from serve_app.engine.backends.base import Projector
from serve_app.engine.pictures import runs
from serve_app.errors import InvalidRequestError
from serve_app.llama.vision.tiles import Tile
from serve_app.types import PICTURE, GenerationRequest, Picture


@dataclass(slots=True)
class PlacedTile:
    """A tile of a picture, and where it stands in a prompt. Decoder thread only, once it is there."""

    start: int
    """Its first token's index."""
    tile: Tile
    picture: Picture
    number: int
    """Among its picture's tiles."""
    key: bytes
    """Tells it from all others with other embeddings."""
    causal: bool
    """Whether its rows may be computed in parts."""
    embeddings: NDArray[np.float32] | None = field(default=None, repr=False)
    """Its embeddings, as long as they are needed."""

    @property
    def end(self) -> int:
        """The index of the token behind it."""
        return self.start + self.tile.n_tokens


def expanded(
    request: GenerationRequest, projector: Projector, n_batch: int
) -> tuple[GenerationRequest, tuple[PlacedTile, ...]]:
    """The request with its pictures' tokens in the places of PICTURE, and where their tiles stand. Raises
    InvalidRequestError for what cannot be computed, in batches of at most `n_batch` rows."""
    prompt: list[int] = []
    placed: list[PlacedTile] = []
    pictures = iter(request.pictures)
    for token in request.prompt:
        if token == PICTURE:
            placed += _place(next(pictures), prompt, projector)
        else:
            prompt.append(token)
    _check(placed, len(prompt), projector, n_batch)
    return replace(request, prompt=tuple(prompt)), tuple(placed)


def _place(picture: Picture, prompt: list[int], projector: Projector) -> list[PlacedTile]:
    """Write a picture's tokens at the prompt's end."""
    placed: list[PlacedTile] = []
    for part in projector.layout(picture.width, picture.height):
        if not isinstance(part, Tile):
            prompt += part
            continue
        if part.n_tokens < runs.LEAST_TOKENS:
            message = f"A picture of {picture.width} x {picture.height} pixels cannot be used."
            raise InvalidRequestError(message, "messages")
        number = len(placed)
        said = projector.fingerprint + picture.key + number.to_bytes(4, "little")
        key = blake2b(said, digest_size=32).digest()
        placed.append(PlacedTile(len(prompt), part, picture, number, key, projector.causal))
        prompt += runs.run(key, part.n_tokens)
    return placed


def _check(placed: Sequence[PlacedTile], n_prompt: int, projector: Projector, n_batch: int) -> None:
    if placed and placed[-1].end == n_prompt:
        raise InvalidRequestError("Text must follow the last picture of a prompt.", "prompt")
    largest = max((one.tile.n_tokens for one in placed), default=0)
    if not projector.causal and largest > n_batch:
        raise InvalidRequestError(
            f"A picture has {largest} tokens, and this model computes them in one batch of "
            f"engine.n_batch ({n_batch}) at most.",
            "messages",
        )
