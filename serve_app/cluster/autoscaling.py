"""Serve's autoscaling policy: how many replicas an engine or the ingress needs, by the work that they have.

Serve calls `by_pressure` in its controller, and applies its own options to the answer. These are the least
and the most replicas, the delays up and down, and that requests wake up a deployment without replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serve_app.channel.pressure import PRESSURE

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


def by_pressure(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's autoscaling policy: as many replicas as the load of all would fill; no change while nobody
    has reported. There is nothing to remember."""
    measured = (context.aggregated_metrics or {}).get(PRESSURE)
    return (sum(measured.values()) if measured else context.target_num_replicas), {}
