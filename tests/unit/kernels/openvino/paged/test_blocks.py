"""Block tables against a cache that copies everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.errors import CacheFullError
from serve_app.kernels.openvino.paged.blocks import BLOCK, BlockTables

N_SEQUENCES = 3
steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 2), st.integers(1, 2 * BLOCK + 3)),
        st.tuples(st.just("truncate"), st.integers(0, 2), st.integers(0, 3 * BLOCK)),
        st.tuples(st.just("share"), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=40,
)


class Cells:
    """The cache's memory, and what each sequence should have in it."""

    def __init__(self, n_blocks: int) -> None:
        self.tables = BlockTables(N_SEQUENCES, range(n_blocks))
        self.n_blocks = n_blocks
        self.cells = [[-1] * BLOCK for _ in range(n_blocks)]
        self.wanted: list[list[int]] = [[] for _ in range(N_SEQUENCES)]
        self.n_written = 0

    def extend(self, sequence: int, n: int) -> None:
        begin = len(self.wanted[sequence])
        try:
            copies = self.tables.extend({sequence: n})
        except CacheFullError:
            return
        for source, target in copies:
            self.cells[target] = list(self.cells[source])
        for position in range(begin, begin + n):
            block = self.tables.blocks(sequence)[position // BLOCK]
            self.cells[block][position % BLOCK] = self.n_written
            self.wanted[sequence].append(self.n_written)
            self.n_written += 1

    def truncate(self, sequence: int, n: int) -> None:
        self.tables.truncate(sequence, n)
        del self.wanted[sequence][n:]

    def share(self, source: int, target: int) -> None:
        self.tables.share(source, target)
        self.wanted[target] = list(self.wanted[source])

    def found(self, sequence: int) -> list[int]:
        length = self.tables.length(sequence)
        tokens = [cell for block in self.tables.blocks(sequence) for cell in self.cells[block]]
        return tokens[:length]


@given(steps=steps, n_blocks=st.integers(1, 8))
def test_no_sequence_writes_into_another_one(
    steps: list[tuple[str, int, int]], n_blocks: int
) -> None:
    cells = Cells(n_blocks)
    for name, sequence, value in steps:
        getattr(cells, name)(sequence, value)
        assert [cells.found(one) for one in range(N_SEQUENCES)] == cells.wanted
    for one in range(N_SEQUENCES):
        cells.truncate(one, 0)
    assert cells.tables.n_free == n_blocks


def test_what_is_shared_takes_no_room() -> None:
    tables = BlockTables(2, range(4))
    tables.extend({0: 2 * BLOCK + 1})
    tables.share(0, 1)
    assert tables.n_free == 1
    (copy,) = tables.extend({1: 1})  # its last block is no longer the other one's
    assert copy == (tables.blocks(0)[2], tables.blocks(1)[2])
    assert tables.blocks(0)[:2] == tables.blocks(1)[:2]
    assert tables.n_free == 0


def test_the_last_one_that_shares_a_block_keeps_it() -> None:
    tables = BlockTables(2, range(2))
    tables.extend({0: 1})
    tables.share(0, 1)
    (copy,) = tables.extend({0: 1, 1: 1})
    assert {tables.blocks(0)[0], tables.blocks(1)[0]} == set(copy)


def test_a_full_cache_changes_nothing() -> None:
    tables = BlockTables(2, range(3))
    tables.extend({0: BLOCK})
    with pytest.raises(CacheFullError):
        tables.extend({0: BLOCK, 1: BLOCK + 1})
    assert (tables.length(0), tables.length(1), tables.n_free) == (BLOCK, 0, 2)
