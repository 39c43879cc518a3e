"""A sequence's state, from one kind of cache to another."""

from __future__ import annotations

import struct
from itertools import permutations

import numpy as np
import pytest

from serve_app.base.formats import State
from serve_app.engine.backends.state_layout import Layout, convert_state

F16, Q8_0 = 1, 8
LAYOUTS = [Layout(n, transposed) for n in (1, 3) for transposed in (False, True)]
SEVERAL = [one._replace(several_dimensions=True) for one in LAYOUTS]
N_CELLS, N_KEYS, N_VALUES = 5, 6, 4


def state(layout: Layout, stream: int = 0, *, value_type: int = F16) -> bytes:
    """Two layers of five cells, whose keys have 6 elements and whose values have 4."""
    where = struct.pack("<iii", 1, 1, -1) if layout.several_dimensions else b""
    cells = b"".join(
        struct.pack("<iI", i, 1) + where + struct.pack("<i", 7) for i in range(N_CELLS)
    )
    parts = [struct.pack("<I", N_CELLS), cells, struct.pack("<II", layout.transposed, 2)]
    for layer in range(2):
        keys = np.arange(N_CELLS * N_KEYS, dtype="<u2") + 100 * layer
        parts += [struct.pack("<iQ", F16, 2 * N_KEYS), keys.tobytes()]
    for layer in range(2):
        values = (np.arange(N_CELLS * N_VALUES, dtype="<u2") + 1000 * layer).reshape(
            N_CELLS, N_VALUES
        )
        if layout.transposed:
            parts += [struct.pack("<iII", value_type, 2, N_VALUES), values.T.tobytes()]
        else:
            parts += [struct.pack("<iQ", value_type, 2 * N_VALUES), values.tobytes()]
    begin = struct.pack("<IiI", 0x1234, 3, layout.n_streams)
    return begin + bytes(4 * stream) + b"".join(parts) + bytes(4 * (layout.n_streams - stream - 1))


@pytest.mark.parametrize(
    ("before", "after"), [*permutations(LAYOUTS, 2), *permutations(SEVERAL, 2)]
)
def test_every_kind_becomes_every_other(before: Layout, after: Layout) -> None:
    assert bytes(convert_state(state(before, before.n_streams - 1), after)) == state(after)


def test_one_of_the_same_kind_is_not_copied() -> None:
    one = state(LAYOUTS[2], 2)
    assert convert_state(one, LAYOUTS[2]) is one


def test_one_without_tokens() -> None:
    empty = struct.pack("<IiIIII", 0x1234, 3, 3, 0, 0, 0)
    assert bytes(convert_state(empty, LAYOUTS[0])) == struct.pack("<IiII", 0x1234, 3, 1, 0)


def test_without_values_there_is_nothing_to_turn() -> None:
    whole = state(LAYOUTS[0])
    n_values = 2 * (12 + 2 * N_CELLS * N_VALUES)
    keys_only = whole[:-n_values]
    turned = convert_state(keys_only, Layout(1, transposed=True))
    assert len(turned) == len(keys_only)
    assert bytes(convert_state(turned, LAYOUTS[0])) == keys_only


@pytest.mark.parametrize(
    "damaged",
    [
        state(LAYOUTS[0])[:60],
        state(LAYOUTS[0])[:-1],
        state(LAYOUTS[0])[:4],
        state(LAYOUTS[0]) + b"\0",
        state(LAYOUTS[0], value_type=Q8_0),
        state(LAYOUTS[0])[:20] + b"\2" + state(LAYOUTS[0])[21:],
    ],
    ids=["cut off", "too short", "no state", "too long", "blocks", "other cells"],
)
def test_what_cannot_be_turned_is_refused(damaged: State) -> None:
    with pytest.raises(ValueError, match=r"Its|cut off|Values|size"):
        convert_state(damaged, Layout(1, transposed=True))
