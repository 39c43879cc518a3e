"""How long llama.cpp computes between two looks. Pure."""

from __future__ import annotations

from serve_app.llama.vision.tiles import Tile

_SHAPES_KEPT = 64
_WEIGHT = 0.5


class NodeTimes:
    """Forecasts how long it is until the next look. Tiles of one shape have one graph: so the same
    look of the last ones tells. Decoder thread only."""

    def __init__(self) -> None:
        self._known: dict[Tile, list[float]] = {}
        self._times: list[float] = []
        self._n_looks = 0

    def begin(self, tile: Tile) -> None:
        """One of that shape is encoded now."""
        if tile not in self._known and len(self._known) >= _SHAPES_KEPT:
            self._known.clear()
        self._times = self._known.setdefault(tile, [])
        self._n_looks = 0

    def observe(self, seconds: float) -> None:
        """Record the time until this look."""
        if self._n_looks < len(self._times):
            self._times[self._n_looks] += _WEIGHT * (seconds - self._times[self._n_looks])
        else:
            self._times.append(seconds)
        self._n_looks += 1

    @property
    def next_s(self) -> float:
        """Seconds until the next look; of a shape that is new, the most that it has been so far."""
        if self._n_looks < len(self._times):
            return self._times[self._n_looks]
        return max(self._times, default=0.0)
