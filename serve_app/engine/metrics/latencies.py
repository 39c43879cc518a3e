"""Histograms of recent times to the first token, and of gaps between tokens."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable

_SLICE_S = 15.0
_N_SLICES = 20
# From a millisecond to ten minutes, each a tenth more than the one before.
BOUNDS = tuple(float(f"{0.001 * 1.1**i:.3g}") for i in range(141))
KINDS = ("ttft_s", "itl_s")


class Latencies:
    """Histograms of the last five minutes. The decoder thread adds, any thread may look.

    Lists of counts and not of times: what adding and looking cost does not grow with the load, and those
    of several engines can be added up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[tuple[float, dict[str, list[int]]]] = deque(maxlen=_N_SLICES)

    def add(self, kind: str, seconds: float) -> None:
        """One of `KINDS` took so long."""
        now = self._clock() // _SLICE_S
        if not self._slices or self._slices[-1][0] != now:
            self._slices.append((now, {kind: [0] * (len(BOUNDS) + 1) for kind in KINDS}))
        self._slices[-1][1][kind][bisect_left(BOUNDS, seconds)] += 1

    def recent(self) -> dict[str, dict[float, int]]:
        """For each kind, how many took up to so many seconds, and more than the bound before it (the last
        bound: or longer); bounds without any are left out."""
        oldest = self._clock() // _SLICE_S - _N_SLICES
        slices = [counts for at, counts in list(self._slices) if at > oldest]
        return {kind: _summed([counts[kind] for counts in slices]) for kind in KINDS}


def _summed(slices: list[list[int]]) -> dict[float, int]:
    summed = [sum(counts) for counts in zip(*slices, strict=True)]
    found: dict[float, int] = {}
    for i, n in enumerate(summed):
        if n:
            bound = BOUNDS[min(i, len(BOUNDS) - 1)]
            found[bound] = found.get(bound, 0) + n
    return found
