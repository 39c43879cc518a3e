"""Where tokens stand behind pictures whose positions have several dimensions."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.base.errors import DecodeError
from serve_app.kernels.llama.vision.positions import Positions, Tile

WIDE, HIGH, FLAT = Tile(12, width=4), Tile(12, width=3), Tile(6)


def with_two() -> Positions:
    """Sequence 1 has a wide picture at 5 and a high one at 20."""
    positions = Positions(several=True)
    positions.take(1, 5, WIDE, 0, 12)
    positions.take(1, 20, HIGH, 0, 12)
    return positions


def test_a_tile_takes_as_many_positions_as_it_is_wide_or_high() -> None:
    assert [tile.n_positions for tile in (WIDE, HIGH, FLAT)] == [4, 4, 6]


@pytest.mark.parametrize(
    ("index", "position"), [(0, 0), (5, 5), (17, 9), (20, 12), (32, 16), (40, 24)]
)
def test_tokens_behind_it_move_up(index: int, position: int) -> None:
    positions = with_two()
    assert positions.of(1, index) == position
    assert positions.of(2, index) == index


@pytest.mark.parametrize("index", [6, 16, 21, 31])
def test_within_one_nothing_can_be_cut(index: int) -> None:
    positions = with_two()
    assert positions.divides(1, index)
    assert not positions.divides(2, index)
    with pytest.raises(DecodeError, match="within a picture"):
        positions.of(1, index)


def test_embeddings_are_told_apart_by_row_and_column() -> None:
    positions = Positions(several=True)
    assert np.array_equal(
        positions.take(0, 2, Tile(6, width=3), 1, 4).reshape(4, -1),
        [[2] * 4, [2, 2, 3, 3], [3, 4, 2, 3], [0] * 4],
    )
    rest = positions.take(0, 2, Tile(6, width=3), 5, 1)
    assert rest.tolist() == [2, 3, 4, 0]
    assert positions.of(0, 8) == 5


def test_a_tile_that_is_not_laid_out_has_one_position_for_each() -> None:
    positions = with_two()
    assert positions.take(1, 33, FLAT, 2, 3).tolist() == [19, 20, 21] * 4
    assert positions.of(1, 36) == 20
    assert Positions(several=False).take(1, 33, FLAT, 2, 3).tolist() == [35, 36, 37]


def test_what_is_cut_off_is_forgotten_and_what_is_copied_is_known() -> None:
    positions = with_two()
    positions.copy(1, 2)
    positions.cut(1, 20)
    assert (positions.of(1, 32), positions.of(2, 32)) == (24, 16)
    positions.cut(2, 0)
    positions.copy(3, 1)
    assert not positions
    assert positions.place([(7, 9, 1, True)]) == [(7, 9, 1, True)]


def test_rows_get_their_positions() -> None:
    rows = [(7, 17, 1, False), (8, 18, 1, True), (9, 3, 0, True)]
    assert with_two().place(rows) == [(7, 9, 1, False), (8, 10, 1, True), (9, 3, 0, True)]


@pytest.mark.parametrize("state", [b"", b"llama.cpp's"])
def test_saved_states_know_their_tiles(state: bytes) -> None:
    positions = with_two()
    for seq_id in (1, 2):
        parted, spans = positions.split(state + positions.pack(seq_id))
        assert bytes(parted) == state
        positions.put(3, spans)
        assert positions.of(3, 32) == positions.of(seq_id, 32)


@pytest.mark.parametrize("state", [b"", b"abc", b"abcd\1\0\0\0"])
def test_states_that_are_cut_off_are_refused(state: bytes) -> None:
    with pytest.raises(DecodeError, match="cut off"):
        Positions(several=True).split(state)


def test_without_several_dimensions_states_are_llama_cpps() -> None:
    positions = Positions(several=False)
    positions.take(1, 5, FLAT, 0, 6)
    assert positions.pack(1) == b""
    assert positions.split(b"abc") == (b"abc", ())
    assert positions.of(1, 11) == 11
