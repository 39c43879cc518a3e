"""The rows that pictures and sounds become in prompts, and their positions.

A model with positions in several dimensions (M-RoPE) gives a picture of 8 rows of 10 embeddings 80 cells,
but 10 positions. So the position of a token behind it is not its index. Everything else knows indices only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import DecodeError
from serve_app.base.formats import Row, State
from serve_app.base.values.media import SAMPLE_RATE, Size


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a picture or sound that is encoded at once: the whole, or what it was cut into."""

    n_tokens: int
    """Embeddings that it becomes, and cells that these take."""
    width: int = 0
    """The embeddings in a row of the tile, if they are told apart by row and column (M-RoPE). With 0,
    each has the position after the one before."""
    causal: bool = True
    """Whether its embeddings see only those before them; otherwise they go into one batch."""

    @property
    def n_positions(self) -> int:
        """How far behind its first embedding the token behind it is."""
        return max(self.width, self.n_tokens // self.width) if self.width else self.n_tokens

    def positions(self, first: int, n_rows: int, start: int) -> NDArray[np.int32]:
        """M-RoPE's positions of the `n_rows` embeddings from the `first` on, for a tile that begins at
        `start`. They are time, row, column and a zero for each, one kind after the other. Source:
        llama.cpp, `mtmd_image_tokens_get_decoder_pos` in tools/mtmd/mtmd.cpp."""
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
    if len(size) == 2:
        return f"A picture of {size[0]} x {size[1]} pixels cannot be used."
    return f"A sound of {size[0] / SAMPLE_RATE:.1f} seconds cannot be used."


_SPAN, _COUNT = struct.Struct("<III"), struct.Struct("<I")


class Span(NamedTuple):
    """A tile in a sequence."""

    start: int
    n_tokens: int
    n_positions: int

    @property
    def end(self) -> int:
        """The index of the token behind it."""
        return self.start + self.n_tokens


Spans = tuple[Span, ...]


class Positions:
    """The tiles that a context's sequences have. One thread.

    Without `several` dimensions there are none, and all indices are positions.
    """

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._spans: dict[int, Spans] = {}

    def __bool__(self) -> bool:
        return bool(self._spans)

    def of(self, seq_id: int, index: int) -> int:
        """The position of a sequence's token. Raises DecodeError for one in a tile behind its first."""
        n_less = 0
        for span in self._spans.get(seq_id, ()):
            if index <= span.start:
                break
            if index < span.end:
                raise DecodeError(f"Token {index} of sequence {seq_id} is within a picture.")
            n_less += span.n_tokens - span.n_positions
        return index - n_less

    def divides(self, seq_id: int, index: int) -> bool:
        """Whether that token is in a tile, and not its first."""
        return any(span.start < index < span.end for span in self._spans.get(seq_id, ()))

    def place(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Rows with their positions in the places of their indices."""
        if not self:
            return rows
        return [(token, self.of(seq_id, i), seq_id, wants) for token, i, seq_id, wants in rows]

    def take(
        self, seq_id: int, start: int, tile: Tile, first: int, n_rows: int
    ) -> NDArray[np.int32]:
        """The positions of `n_rows` embeddings, from the `first` on, of a tile whose first token has
        the index `start`. One dimension comes after the other."""
        position = self.of(seq_id, start)
        if not self._several:
            return np.arange(position + first, position + first + n_rows, dtype=np.int32)
        if tile.width:
            before = (one for one in self._spans.get(seq_id, ()) if one.start < start)
            self.put(seq_id, (*before, Span(start, tile.n_tokens, tile.n_positions)))
        return tile.positions(first, n_rows, position)

    def cut(self, seq_id: int, n_tokens: int) -> None:
        """A sequence has no more than its first tokens now."""
        spans = self._spans.get(seq_id, ())
        self.put(seq_id, tuple(one for one in spans if one.start < n_tokens))

    def copy(self, source: int, target: int) -> None:
        self.put(target, self._spans.get(source, ()))

    def put(self, seq_id: int, spans: Spans) -> None:
        """A sequence has these tiles, and no others."""
        if spans:
            self._spans[seq_id] = spans
        else:
            self._spans.pop(seq_id, None)

    def clear(self) -> None:
        self._spans.clear()

    # -- in saved states --------------------------------------------------------------------------

    def pack(self, seq_id: int) -> bytes:
        """The bytes behind a sequence's saved state: its tiles, and how many these are."""
        if not self._several:
            return b""
        spans = self._spans.get(seq_id, ())
        return b"".join(_SPAN.pack(*one) for one in spans) + _COUNT.pack(len(spans))

    def split(self, state: State) -> tuple[State, Spans]:
        """llama.cpp's own part of a saved state, and the tiles. Raises DecodeError if it has none."""
        if not self._several:
            return state, ()
        whole = memoryview(state)
        n_before = len(whole) - _COUNT.size
        n_before -= _SPAN.size * _COUNT.unpack_from(whole, n_before)[0] if n_before >= 0 else 0
        if n_before < 0:
            raise DecodeError("The saved state is cut off.")
        tiles = whole[n_before : len(whole) - _COUNT.size]
        return whole[:n_before], tuple(Span(*one) for one in _SPAN.iter_unpack(tiles))
