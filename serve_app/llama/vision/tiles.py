"""The rows that pictures and sounds become in prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serve_app.types import SAMPLE_RATE, Size


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a picture or sound that is encoded at once: the whole, or what it was cut into."""

    n_tokens: int
    """Embeddings that it becomes, and cells that these take."""
    width: int = 0
    """The embeddings in a row of the tile, if they are told apart by row and column (M-RoPE); 0: each has
    the position after the one before."""
    causal: bool = True
    """Whether its embeddings see only those before them; otherwise they go into one batch."""

    @property
    def n_positions(self) -> int:
        """How far behind its first embedding the token behind it is."""
        return max(self.width, self.n_tokens // self.width) if self.width else self.n_tokens

    def positions(self, first: int, n_rows: int, start: int) -> NDArray[np.int32]:
        """For each of its `n_rows` embeddings from the `first` on, time, row, column and a zero, one kind
        after the other: M-RoPE's positions of a tile that begins at `start`. Source: llama.cpp,
        `mtmd_image_tokens_get_decoder_pos` in tools/mtmd/mtmd.cpp."""
        index = np.arange(first, first + n_rows, dtype=np.int32)
        if not self.width:
            return np.tile(start + index, 4)
        row, column = np.divmod(index, np.int32(self.width))
        time = np.full(n_rows, start, np.int32)
        return np.concatenate([time, start + row, start + column, np.zeros(n_rows, np.int32)])


Part = Tile | tuple[int, ...]
"""A piece of what a picture becomes in a prompt: a tile, or the tokens around."""

Pause = Callable[[], bool]
"""Called now and then while a picture is encoded, on the same thread; False ends that."""


def cannot_be_used(size: Size) -> str:
    """A message about a picture or sound."""
    if len(size) == 2:
        return f"A picture of {size[0]} x {size[1]} pixels cannot be used."
    return f"A sound of {size[0] / SAMPLE_RATE:.1f} seconds cannot be used."
