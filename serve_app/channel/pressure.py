"""The load that replicas report for autoscaling: how many replicas their work would fill."""

from __future__ import annotations

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
    """How many replicas one replica's work would fill. It counts the seconds until all would be done,
    requests for each slot, and the part of the KV cache of running requests."""
    return max(backlog_s / _BACKLOG_S, slots / _SLOTS, cells / _CELLS)


def ingress_pressure(open_requests: float, cpu: float) -> float:
    """How many ingress replicas one's work would fill as they should be. `open_requests` is a part of the
    most that it takes, and `cpu` of one core."""
    return max(open_requests / _OPEN, cpu / _CPU)
