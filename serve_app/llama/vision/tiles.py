"""The rows that pictures become in prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a picture that is encoded at once: the whole, or what it was cut into."""

    n_tokens: int
    """Embeddings that it becomes, and cells and positions that these take."""


Part = Tile | tuple[int, ...]
"""A piece of what a picture becomes in a prompt: a tile, or the tokens around."""

Pause = Callable[[], bool]
"""Called now and then while a picture is encoded, on the same thread; False ends that."""
