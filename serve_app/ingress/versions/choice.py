"""The weights of a model's versions. Pure: no Ray, no clock.

Versions are files, or settings, that are served under one id, each by engines of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from serve_app.errors import InvalidRequestError


def changed(weights: Mapping[str, float], percents: Mapping[str, float]) -> dict[str, float]:
    """Weights in percent: as asked for, and the other versions share the rest as they did before. Raises
    InvalidRequestError."""
    for name, percent in percents.items():
        if name not in weights:
            known = ", ".join(weights)
            raise InvalidRequestError(
                f"There is no version {name!r}. The versions are: {known}.", "weights"
            )
        if not 0 <= percent <= 100:
            raise InvalidRequestError("Weights are percentages, from 0 to 100.", "weights")
    rest = 100.0 - math.fsum(percents.values())
    others = {name: weight for name, weight in weights.items() if name not in percents}
    if rest < -1e-6 or (rest > 1e-6 and not others):
        raise InvalidRequestError(f"The weights add up to {100 - rest:g}, not to 100.", "weights")
    return {
        name: percents[name] if name in percents else _part(name, others, rest) for name in weights
    }


def _part(name: str, others: Mapping[str, float], rest: float) -> float:
    total = math.fsum(others.values())
    if total:
        return max(0.0, rest) * others[name] / total
    if rest > 1e-6 and len(others) > 1:
        raise InvalidRequestError(
            f"{rest:g} percent are left, and none of {' and '.join(others)} has a share now. Name the one "
            "that gets them.",
            "weights",
        )
    return max(0.0, rest)


def before_rollout(
    now: Mapping[str, float], earlier: Iterable[Mapping[str, float]]
) -> dict[str, float] | None:
    """The weights to go back to: of earlier ones, the latest first, those of a moment at which one version
    that is still there had everything, and not the one that has everything now. None if there was none."""
    for weights in earlier:
        sole = _sole(weights)
        if sole is not None and sole in now and sole != _sole(now):
            return {name: 100.0 if name == sole else 0.0 for name in now}
    return None


def _sole(weights: Mapping[str, float]) -> str | None:
    given = [name for name, weight in weights.items() if weight > 0]
    return given[0] if len(given) == 1 else None


def given(weights: Mapping[str, float], is_ready: Mapping[str, bool]) -> dict[str, float]:
    """The weights of versions that can answer. If none can, requests wait, and all weights count."""
    ready = {name: weight if is_ready[name] else 0.0 for name, weight in weights.items()}
    return ready if any(ready.values()) else dict(weights)
