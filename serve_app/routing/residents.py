"""Which of the models that are loaded on demand are loaded: one look at all of them, in Serve's controller.

Pure: it is told what Serve knows, and what time it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_TURN_S = 60.0
"""A model that is never idle gives way to one that is waited for after so long."""
_STAY_S = 15.0
"""A model that has just come is not called idle before it has said so."""
_FORGET_S = 30.0
"""A deployment that Serve has not used for so long counts as gone."""


@dataclass(slots=True)
class _Resident:
    """One model."""

    asked_at: float
    """When the policy was asked last."""
    used_at: float
    """When somebody wanted it last."""
    n_running: int = 0
    is_wanted: bool = False
    """Whether somebody waits for it or is served by it."""
    came_at: float = 0.0
    """When there was no replica last."""


class Residents:
    """The models of one application that are loaded on demand. Of one thread."""

    def __init__(self) -> None:
        self._all: dict[str, _Resident] = {}
        self._awaited: dict[str, float] = {}
        """When an ingress told last that requests wait for that one."""

    def are_awaited(self, names: Iterable[str], now: float) -> None:
        """Requests wait for these to be loaded. Serve starts what has no replica without asking the
        policy, so ingresses tell."""
        self._awaited |= dict.fromkeys(names, now)

    def n_replicas(
        self,
        name: str,
        now: float,
        keep_alive_s: float,
        *,
        max_loaded: int,
        n_running: int,
        is_wanted: bool,
        n_needed: float,
        idle_s: float | None = None,
    ) -> float:
        """How many replicas a model should have, of which so many run and so many are needed by its load.
        `idle_s` is for how long nobody has wanted it, if its replicas say so.

        It stays for `keep_alive_s` after somebody wanted it. While another one is waited for and
        `max_loaded` are there, the least recently used gives way before that. One that is never idle has
        a turn of a minute.
        """
        one = self._all.setdefault(name, _Resident(now, now - keep_alive_s, came_at=now))
        one.asked_at, one.n_running, one.is_wanted = now, n_running, is_wanted
        if is_wanted:
            one.used_at = now
        elif idle_s is not None:
            one.used_at = now - idle_s
        if not n_running:
            one.came_at = now
        if n_running and self._gives_way(name, now, max_loaded):
            one.used_at = now - keep_alive_s
        if now - one.used_at >= keep_alive_s:
            return 0.0
        return max(1.0, n_needed)

    def _gives_way(self, name: str, now: float, max_loaded: int) -> bool:
        loaded = {
            other: one
            for other, one in self._all.items()
            if one.n_running and now - one.asked_at < _FORGET_S
        }
        awaited = {other for other, at in self._awaited.items() if now - at < _FORGET_S}
        if len(loaded) + bool(awaited - loaded.keys()) <= max_loaded:
            return False
        idle = {
            other: one.used_at
            for other, one in loaded.items()
            if not one.is_wanted and now - one.came_at >= _STAY_S
        }
        if idle:
            return name == min(idle, key=lambda other: idle[other])
        turns = {other: one.came_at for other, one in loaded.items()}
        first = min(turns, key=lambda other: turns[other], default=name)
        return name == first and now - turns.get(first, now) >= _TURN_S


APPLICATIONS: dict[str, Residents] = {}
"""By the name of the application."""
