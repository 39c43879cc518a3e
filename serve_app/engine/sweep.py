"""Measures what passes cost, by running some."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from serve_app.engine.backend import Row
from serve_app.engine.cost_model import Measurements

_CHUNKS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
# Kernels work on whole tiles: of the first rows after a prefix, as many as this cost about the same.
_PROBE = 32


class Sweep:
    """One sweep over an empty cache, which it leaves empty. Decoder thread only.

    It grows from small passes to large ones and stops when the next would take it past `limit_s`:
    what was not measured is predicted from what was.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[Row]], None],
        truncate: Callable[[int, int], None],
        *,
        n_slots: int,
        n_ctx_slot: int,
        n_batch: int,
        limit_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decode, self._truncate = decode, truncate
        self._n_slots = n_slots
        self._sizes = [size for size in _CHUNKS if size <= min(n_batch, n_ctx_slot - _PROBE)]
        self._clock = clock
        self._deadline = clock() + limit_s

    def run(self) -> Measurements:
        """Measure decoding first: it is what every step is made of."""
        decode_s = self._measure_decode()
        prefill_s = self._measure_prefill()
        return Measurements(decode_s, prefill_s, self._measure_attention(prefill_s))

    def _measure_decode(self) -> dict[int, float]:
        lanes = [2**n for n in range(self._n_slots.bit_length()) if 2**n < self._n_slots]
        found: dict[int, float] = {}
        for n_lanes in [*lanes, self._n_slots]:
            if found and not self._time_for(2 * max(found.values()) * 2):
                break
            found[n_lanes] = min(self._timed([(lane, 1) for lane in range(n_lanes)]) for _ in "ab")
        return found

    def _measure_prefill(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for size in self._sizes:
            if found and not self._time_for(2 * max(found.values()) * 2):
                break
            found[size] = min(self._timed([(0, size)]) for _ in "ab")
        return found

    def _measure_attention(self, prefill_s: dict[int, float]) -> float:
        """Seconds that a row costs more for each token before it."""
        if _PROBE not in prefill_s:
            return 0.0
        n_past = max(prefill_s)
        self._pass([(0, n_past)])
        deep_s = min(self._timed([(0, _PROBE)], n_past) for _ in "ab")
        self._truncate(0, 0)
        return max(0.0, deep_s - prefill_s[_PROBE]) / (_PROBE * n_past)

    def _time_for(self, seconds: float) -> bool:
        return self._clock() + seconds < self._deadline

    def _timed(self, lanes: list[tuple[int, int]], n_past: int = 0) -> float:
        """Seconds of one pass over so many rows of each lane, which are forgotten again."""
        began = self._clock()
        self._pass(lanes, n_past)
        seconds = self._clock() - began
        for lane, _ in lanes:
            self._truncate(lane, n_past)
        return seconds

    def _pass(self, lanes: list[tuple[int, int]], n_past: int = 0) -> None:
        self._decode(
            [
                (0, n_past + position, lane, position == n_rows - 1)
                for lane, n_rows in lanes
                for position in range(n_rows)
            ]
        )
