"""Ray's exporter makes the metrics of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.util import metrics

from serve_app.base.metrics import Tags, make_with


def use_rays_exporter() -> None:
    """Have Ray export the metrics that this process makes from now on."""
    make_with(_make)


def _make(
    kind: str, name: str, what: str, ends: Sequence[float] | None, labels: Sequence[str], tags: Tags
) -> Any:
    boundaries = () if ends is None else (list(ends),)
    metric = getattr(metrics, kind)(name, what, *boundaries, tuple(labels))
    metric.set_default_tags(dict(tags))
    return metric
