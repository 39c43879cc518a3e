"""Which of a model's versions answers a request. Pure: no Ray, no clock.

Versions are files, or settings, that are served under one id, each by engines of its own.
A conversation stays at its version, as that has its prefix in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from serve_app.errors import InvalidRequestError
from serve_app.types import Version

BEGINNING_CHARS = 1024
"""Of a text that is no chat, so many characters count: it may grow, as a chat does."""
_POINTS = 2**64


class Versioned(Protocol):
    """A model that may be one of several versions."""

    @property
    def version(self) -> Version | None:
        """None if there is only one."""


V = TypeVar("V", bound=Versioned)


def chosen(versions: Sequence[V], beginning: str | None) -> V:
    """The version for a conversation with this beginning; the one with the largest weight if there is none.

    Each version draws a number for each beginning, and the best one wins: when a weight changes, no
    conversation moves but those that this version gains or loses. Source: Schindelhauer and Schomaker,
    "Weighted distributed hash tables", SPAA 2005 (the logarithmic method).
    """
    if len(versions) == 1:
        return versions[0]
    weights = [0.0 if one.version is None else one.version.present_weight for one in versions]
    if beginning is None or not any(weights):
        return versions[weights.index(max(weights))]
    key = blake2b(beginning.encode(errors="surrogatepass")).digest()
    draws = [
        _draw(one, key) / weight if weight else math.inf
        for one, weight in zip(versions, weights, strict=True)
    ]
    return versions[draws.index(min(draws))]


def _draw(one: Versioned, key: bytes) -> float:
    """Distributed exponentially, with a mean of 1."""
    name = "" if one.version is None else one.version.name
    digest = blake2b(key + name.encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 1) / _POINTS)


def changed(weights: Mapping[str, float], asked: Mapping[str, float]) -> dict[str, float]:
    """Weights in percent: as asked for, and the other versions share the rest as they did before. Raises
    InvalidRequestError."""
    for name, percent in asked.items():
        if name not in weights:
            known = ", ".join(weights)
            raise InvalidRequestError(
                f"There is no version {name!r}. The versions are: {known}.", "weights"
            )
        if not 0 <= percent <= 100:
            raise InvalidRequestError("Weights are percentages, from 0 to 100.", "weights")
    rest = 100.0 - math.fsum(asked.values())
    others = {name: weight for name, weight in weights.items() if name not in asked}
    if rest < -1e-6 or (rest > 1e-6 and not others):
        raise InvalidRequestError(f"The weights add up to {100 - rest:g}, not to 100.", "weights")
    return {name: asked[name] if name in asked else _part(name, others, rest) for name in weights}


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


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Parts of 1."""
    total = math.fsum(weights.values())
    return {name: weight / total if total else 0.0 for name, weight in weights.items()}


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
    """The weights of those that can answer; all of them, if none of these can: what is asked waits then."""
    ready = {name: weight if is_ready[name] else 0.0 for name, weight in weights.items()}
    return ready if any(ready.values()) else dict(weights)
