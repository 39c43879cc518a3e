"""Serve's autoscaling policy: how many replicas an engine or the ingress needs, by the work that they have.

Serve calls `by_pressure` in its controller, and applies its own options to what it says: the least and the
most replicas, the delays up and down, and that requests wake up a deployment without replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

PRESSURE = "pressure"
"""Name of the metric that replicas report to Serve."""
# What an engine should have at most: seconds of work, busy slots, and cache cells that are in use.
_BACKLOG_S = 10.0
_SLOTS = 0.8
_CELLS = 0.9
# What an ingress should: the part of its open requests, and of the one core that its event loop can use.
_OPEN = 0.25
_CPU = 0.6


def engine_pressure(backlog_s: float, slots: float, cells: float) -> float:
    """How many replicas one replica's work would fill: the seconds until all would be done, requests for
    each slot, and the part of the KV cache that running requests take."""
    return max(backlog_s / _BACKLOG_S, slots / _SLOTS, cells / _CELLS)


def ingress_pressure(open_requests: float, cpu: float) -> float:
    """How many ingress replicas one's work would fill as they should be: its open requests as a part of the
    most that it takes, and its CPU time as a part of one core."""
    return max(open_requests / _OPEN, cpu / _CPU)


def by_pressure(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's autoscaling policy: as many replicas as the load of all would fill; no change while nobody
    has reported. There is nothing to remember."""
    measured = (context.aggregated_metrics or {}).get(PRESSURE)
    return (sum(measured.values()) if measured else context.target_num_replicas), {}
