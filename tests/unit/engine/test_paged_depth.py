"""What depth adds to batches of a paged cache, by a scripted clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from serve_app.engine.autotune.cost_model import CostModel, Profile
from serve_app.engine.backends.base import Row
from serve_app.engine.backends.paged_depth import measure_depth

SHALLOW = Profile({1: 0.01, 4: 0.02}, {16: 0.05, 64: 0.15, 512: 1.0})


class Cache:
    """A batch takes 10 us for each row and token before it, besides what it takes in an empty cache."""

    def __init__(self) -> None:
        self.now, self.length = 0.0, 0

    def clock(self) -> float:
        return self.now

    def pretend(self, seq_id: int, n_tokens: int) -> None:
        assert (seq_id, self.length) == (0, 0)
        self.length = n_tokens

    def decode(self, rows: Sequence[Row]) -> None:
        n = len(rows)
        assert [row[1] for row in rows] == list(range(self.length, self.length + n))
        shallow = SHALLOW.decode_s if n == 1 else SHALLOW.prefill_s
        self.now += shallow[n] + n * self.length * 1e-5
        self.length += n

    def truncate(self, seq_id: int, n_past: int) -> None:
        self.length = min(self.length, n_past)

    def copy(self, source: int, target: int) -> None: ...

    def save(self, seq_id: int) -> bytes:
        return b""

    def restore(self, seq_id: int, state: bytes | memoryview) -> None: ...


def test_depth_is_added_to_all_batches() -> None:
    cache = Cache()
    depth = measure_depth(cache, SHALLOW, 1024, 60.0, cache.clock)
    assert cache.length == 0
    assert depth.decode_s == pytest.approx({1: 0.01024})
    assert depth.prefill_s == pytest.approx({16: 0.16384, 64: 0.65536})
    costs = CostModel(depth.added_to(SHALLOW, unified=False))
    assert costs.decode_s(4, 1024) == pytest.approx(0.02 + 4 * 0.01024)
    assert costs.prefill_s(64, 512) == pytest.approx(0.15 + 64 * 512e-5)


def test_without_time_one_batch_tells() -> None:
    cache = Cache()
    depth = measure_depth(cache, SHALLOW, 1024, 0.0, cache.clock)
    assert depth.decode_s == pytest.approx({1: 0.01024})
    assert cache.length == 0
