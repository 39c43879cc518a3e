"""How llama.cpp lays out a sequence's state, and how one kind of cache's becomes another's. Pure.

A state begins with two words (a magic number, the sequence's id). Then comes the number of streams, and
for each stream the number of its cells. A split cache has a stream for each sequence, a unified one has
one. Behind the only number that is not 0 stand the cells (position, number of sequences, sequence). Then
come whether values are transposed, the number of layers, all layers' keys, and their values. Without flash
attention, values are transposed: all cells' first elements come first.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from serve_app.base.formats import State

_WORD = 4
_BEGIN = 2 * _WORD
# Behind the number of cells: a cell's words.
_CELL_BYTES = 3 * _WORD
# And what stands before its sequence, where positions have several dimensions: column, row and token.
_DIMENSIONS_BYTES = 3 * _WORD
# What keys begin with (type, bytes of a cell). So do values, unless they are transposed (type, bytes of an
# element, elements of a cell).
_KEYS, _VALUES = struct.Struct("<iQ"), struct.Struct("<iII")


class Layout(NamedTuple):
    """The kind of cache that a state is of."""

    n_streams: int
    transposed: bool
    several_dimensions: bool = False
    """Whether positions have."""


def convert_state(state: State, layout: Layout) -> State:
    """The state of the same tokens for a cache of that kind; the state itself if it is of that kind.
    Raises ValueError if it is of a cache with several kinds of layers, or has values of a format that
    cannot be turned."""
    try:
        return _convert_state(state, layout)
    except struct.error as error:
        raise ValueError("It is cut off.") from error


def _convert_state(state: State, layout: Layout) -> State:
    whole = memoryview(state).cast("B")
    n_streams, start = _word(whole, _BEGIN), _BEGIN + _WORD
    counts = whole[start : start + _WORD * n_streams]
    before = next((i for i in range(len(counts) // _WORD) if _word(counts, _WORD * i)), None)
    if before is None:
        return _join_streams(state, layout, [])
    stream = whole[start + _WORD * before : len(whole) - _WORD * (n_streams - before - 1)]
    n_cells = _word(stream, 0)
    end = _WORD + n_cells * (_CELL_BYTES + layout.several_dimensions * _DIMENSIONS_BYTES)
    transposed = _word(stream, end)
    if transposed > 1 or _word(stream, 2 * _WORD) != 1:
        raise ValueError("Its cells are not only positions.")
    keys_end = _end_of_keys(stream, end + _WORD, n_cells)
    keys = stream[end + _WORD : keys_end]
    values: list[State] = [stream[keys_end:]]
    if layout.transposed != transposed:
        values = _turn_values(stream[keys_end:], n_cells, keys, layout.transposed)
    elif layout.n_streams == n_streams:
        return state
    is_transposed = struct.pack("<I", layout.transposed)
    return _join_streams(state, layout, [stream[:end], is_transposed, keys, *values])


def _join_streams(state: State, layout: Layout, stream: list[State]) -> State:
    n_empty = layout.n_streams - bool(stream)
    begin = bytes(memoryview(state)[:_BEGIN]) + struct.pack("<I", layout.n_streams)
    return memoryview(b"".join([begin, *stream, bytes(_WORD * n_empty)]))


def _end_of_keys(stream: memoryview, start: int, n_cells: int) -> int:
    end = start + _WORD
    for _ in range(_word(stream, start)):
        if end + _KEYS.size > len(stream):
            raise ValueError("Its layers are cut off.")
        end += _KEYS.size + _KEYS.unpack_from(stream, end)[1] * n_cells
    if end > len(stream):
        raise ValueError("Its layers are cut off.")
    return end


def _turn_values(
    values: memoryview, n_cells: int, keys: memoryview, transposed: bool
) -> list[State]:
    turned: list[State] = []
    start = 0
    for _ in range(_word(keys, 0) if values else 0):
        kind, *sizes = (_KEYS if transposed else _VALUES).unpack_from(values, start)
        start += (_KEYS if transposed else _VALUES).size
        n_element = {0: 4, 1: 2, 30: 2}.get(kind)  # f32, f16, bf16
        if n_element is None:
            raise ValueError("Values of this format cannot be turned.")
        n_elements = sizes[0] // n_element if transposed else sizes[1]
        n_bytes = n_cells * n_elements * n_element
        shape = (n_cells, n_elements) if transposed else (n_elements, n_cells)
        words = np.frombuffer(values[start : start + n_bytes], f"u{n_element}").reshape(shape)
        head = (
            _VALUES.pack(kind, n_element, n_elements)
            if transposed
            else _KEYS.pack(kind, n_elements * n_element)
        )
        turned += [head, words.T.tobytes()]
        start += n_bytes
    if start != len(values):
        raise ValueError("Its values have another size.")
    return turned


def _word(data: memoryview, at: int) -> int:
    if at + _WORD > len(data):
        raise ValueError("It is cut off.")
    return int.from_bytes(data[at : at + _WORD], "little")
