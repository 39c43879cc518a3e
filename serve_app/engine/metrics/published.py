"""The decoder loop's state for other threads: made when it may be read, not in every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from serve_app.engine.core.scheduler.backlog import Forecast
from serve_app.engine.metrics.stats import CachedPrefixes, EngineStats

_EVERY_S = 0.5
"""The oldest that anything is while the engine works."""


class View(NamedTuple):
    """The loop at one moment. Immutable."""

    stats: EngineStats
    cached_prefixes: CachedPrefixes
    forecast: Forecast


class Published:
    """The newest view. Any thread reads it; the decoder thread makes it.

    A new one is made when something has changed but the number of tokens, when somebody has read the last
    one, and after _EVERY_S.
    """

    def __init__(self, make: Callable[[], View]) -> None:
        self._make = make
        self._is_read = False
        self.refresh()

    @property
    def view(self) -> View:
        """The newest one. The next step makes another."""
        self._is_read = True
        return self._view

    def refresh(self) -> None:
        """Decoder thread: make it now."""
        self._is_read = False
        self._view = self._make()
        self._made = time.monotonic()

    def stepped(self, *, changed: bool) -> None:
        """Decoder thread: a step is over; `changed` says whether it changed anything but the number of
        tokens."""
        if changed or self._is_read or time.monotonic() >= self._made + _EVERY_S:
            self.refresh()
