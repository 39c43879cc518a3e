"""What pictures become in prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a picture that is encoded at once: the whole, or what it was cut into."""

    n_tokens: int
    """Embeddings that it becomes, and cells that these take."""
    n_positions: int
    """By how many positions the text behind it is further on: fewer than cells, where positions have
    several dimensions."""
    grid: NDArray[np.int32] | None
    """For each embedding, how far its position is from the tile's first one, in time, height, width and a
    fourth dimension; None where positions are numbers that go up by one."""


Part = Tile | tuple[int, ...]
"""A piece of what a picture becomes in a prompt: a tile, or the tokens around."""

Pause = Callable[[], bool]
"""Called now and then while a picture is encoded, on the same thread; False ends that."""
