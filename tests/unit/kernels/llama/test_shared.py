"""Which of the things that are shared are kept."""

from __future__ import annotations

from functools import partial
from typing import Any

from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.shared import Shared


class Thing:
    """Can be referred to weakly."""


class Things:
    """Notes what it makes. A name's length is its weight."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self._shared = Shared[str, Thing](10, len)

    def __getitem__(self, name: str) -> Thing:
        return self._shared.get(name, partial(self._make, name))

    def _make(self, name: str) -> Thing:
        self.made.append(name)
        return Thing()


def test_the_last_ones_are_kept_up_to_a_weight() -> None:
    things = Things()
    for name in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa"):
        things[name]
    assert things.made == ["aaaa", "bbbb", "cccc"]
    things["bbbb"]
    assert things.made == ["aaaa", "bbbb", "cccc", "bbbb"]


def test_a_heavy_one_is_kept_as_long_as_it_is_used() -> None:
    """A request for many answers has one grammar for all."""
    things = Things()
    used = things["h" * 100]
    assert things["h" * 100] is used
    del used
    things["h" * 100]
    assert things.made == ["h" * 100] * 2


def test_a_heavy_one_pushes_out_nobody() -> None:
    things = Things()
    for name in ("small", "h" * 100, "small"):
        things[name]
    assert things.made == ["small", "h" * 100]


def test_a_sequences_constraint_is_a_use() -> None:
    shared = Shared[str, Constraint](10, len)
    matcher: Any = Matcher()
    fresh = shared.get("h" * 100, lambda: Constraint(matcher, 8)).fresh()
    assert shared.get("h" * 100, lambda: Constraint(matcher, 8)) is fresh._origin


class Matcher:
    """One that takes everything."""

    def is_error(self) -> bool:
        return False

    def deep_copy(self) -> Matcher:
        return self
