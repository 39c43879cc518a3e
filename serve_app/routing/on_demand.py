"""Serve's autoscaling policy for models that are loaded when somebody asks for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class OnDemand:
    """See `serve_app.routing.residents`. Serve starts a deployment without replicas as soon as a request
    waits for it, without asking; the replica then waits until Ray has cores for it."""

    def __init__(self, keep_alive_s: float, max_loaded: int) -> None:
        self._keep_alive_s = keep_alive_s
        self._max_loaded = max_loaded

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """How many replicas this deployment should have."""
        # Serve sends this module by value, each time anew; what policies have in common is in modules
        # that its controller imports.
        from serve_app.routing import residents
        from serve_app.routing.autoscaling import IDLE_S, PRESSURE

        measured = context.aggregated_metrics or {}
        pressure = sum((measured.get(PRESSURE) or {}).values())
        idle_s = min((measured.get(IDLE_S) or {}).values(), default=None)
        queued = context.total_queued_requests or 0.0
        found = residents.APPLICATIONS.setdefault(context.app_name or "", residents.Residents())
        wanted = found.n_replicas(
            context.deployment_name,
            time.monotonic(),
            self._keep_alive_s,
            max_loaded=self._max_loaded,
            n_running=context.current_num_replicas,
            is_wanted=pressure > 0 or queued > 0,
            n_needed=pressure,
            idle_s=idle_s,
        )
        return wanted, {}


def for_ingress(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The policy of ingresses beside such models: by their load. They tell what requests wait for."""
    from serve_app.routing import residents
    from serve_app.routing.autoscaling import AWAITED, by_pressure

    found = context.aggregated_metrics or {}
    awaited = [
        name.removeprefix(AWAITED)
        for name, told in found.items()
        if name.startswith(AWAITED) and sum(told.values()) > 0
    ]
    here = residents.APPLICATIONS.setdefault(context.app_name or "", residents.Residents())
    here.are_awaited(awaited, time.monotonic())
    return by_pressure(context)
