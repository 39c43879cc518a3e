"""The weights of a model's versions, as they were changed while serving: the same for all ingresses.

The newest change counts, unless the configuration's weights are others than those that it changed: then
these do. All functions ask Ray's head: see `serve_app.store.numbered_entries`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.store.numbered_entries import NumberedEntries

MOST = 32
"""Changes of one model that are remembered."""

Weights = Mapping[str, float]
"""By the names of versions."""


@dataclass(frozen=True, slots=True)
class WeightChange:
    """One change of a model's weights."""

    number: int
    weights: Weights
    configured: Weights
    """The configuration's, when it was made."""


class VersionWeights:
    """Those of one application."""

    def __init__(self, app: str) -> None:
        self._entries = NumberedEntries("versions", app)

    def newest(self, model: str) -> WeightChange | None:
        """The last change, if there was one."""
        numbers = self._entries.numbers(model)
        return self._read(model, numbers[-1]) if numbers else None

    def history(self, model: str) -> list[WeightChange]:
        """All that are remembered, the newest first."""
        numbers = reversed(self._entries.numbers(model))
        found = (self._read(model, number) for number in numbers)
        return [one for one in found if one is not None]

    def add(self, model: str, weights: Weights, configured: Weights) -> WeightChange:
        """A change. Of two that are made at once, the later one counts."""
        told = {"weights": dict(weights), "configured": dict(configured)}
        number = self._entries.add(model, told)
        for old in self._entries.numbers(model)[:-MOST]:
            self._entries.remove(model, old)
        return WeightChange(number, weights, configured)

    def _read(self, model: str, number: int) -> WeightChange | None:
        told = self._entries.get(model, number)
        return None if told is None else WeightChange(number, told["weights"], told["configured"])
