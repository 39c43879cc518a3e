"""How far the start of a model's engine is, told to whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """The present stage of the work, and its progress."""

    name: str
    """"downloading", "converting", "loading" or "measuring"."""
    done: float = 0.0
    """The part of the weights that is here, converted or loaded; nothing while measuring."""
    limit_s: float | None = None
    """The most seconds that the stage takes; None: no limit."""
    n_bytes: int = 0
    """The bytes that this process has downloaded in the stage."""


Report = Callable[[Stage], None]
"""Any thread may call. It does not block for long, and raises nothing but the ConfigError that ends a
download."""


def nowhere(_: Stage) -> None:
    """A report that nobody reads."""
