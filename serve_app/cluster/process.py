"""The parts of Ray that a cluster's process uses: the exporter of metrics, and the values of the head."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from ray.util import metrics

from serve_app.base.logs import forward_to_serve
from serve_app.base.metrics import Tags, make_with
from serve_app.cluster.ray_values import RayValues
from serve_app.store.shared_entries import share_by

logger = logging.getLogger("corral.replica")


def begin_replica(*, keeps_texts: bool) -> None:
    """Make this process a replica of Serve's: its logs, metrics and shared entries are Ray's. `keeps_texts`
    says whether its log may have clients' texts."""
    forward_to_serve(keeps_texts=keeps_texts)
    if (niceness := os.nice(0)) > 0:
        logger.info(
            "Other processes go first (nice %d). Set RAY_worker_niceness=0 before Ray starts to change it.",
            niceness,
        )
    use_rays_exporter()
    share_by(RayValues())


def use_rays_exporter() -> None:
    """Have Ray export the metrics that this process makes from now on."""
    make_with(_make)


def _make(
    kind: str, name: str, what: str, ends: Sequence[float] | None, labels: Sequence[str], tags: Tags
) -> Any:
    boundaries = () if ends is None else (list(ends),)
    of_kind: Any = RayCounter if kind == "Counter" else getattr(metrics, kind)
    metric = of_kind(name, what, *boundaries, tuple(labels))
    metric.set_default_tags(dict(tags))
    return metric


class RayCounter(metrics.Counter):
    """Ray's counter, which takes 0 as well."""

    def inc(self, value: float = 1.0, tags: Any = None) -> None:
        if value:
            super().inc(value, tags or {})
        else:
            self._record(value, tags)
