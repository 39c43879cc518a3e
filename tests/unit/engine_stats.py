"""An engine's statistics with some of their fields changed, by the fields' names."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from serve_app.engine.metrics.stats import EngineStats


def changed_stats(stats: EngineStats, **changed: Any) -> EngineStats:
    """Every field is in one group only, or in none."""
    for group in fields(stats):
        values = getattr(stats, group.name)
        names = {field.name for field in fields(values)} if is_dataclass(values) else set[str]()
        here = {name: changed.pop(name) for name in names & changed.keys()}
        if here:
            stats = replace(stats, **{group.name: replace(values, **here)})
    return replace(stats, **changed)
