"""The ingress as a Serve deployment."""

from __future__ import annotations

import functools
import time
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.channel.pressure import PRESSURE, ingress_pressure
from serve_app.cluster.process import begin_replica
from serve_app.cluster.responses import RayStore
from serve_app.cluster.serve_handle import ServeHandle
from serve_app.config.resolved import ResolvedModel
from serve_app.run.ingress import IngressPlace, IngressServer, IngressSettings, open_parts
from serve_app.server.model_control import ModelHost

_TELL_S = 2.0


async def _tell_ingresses() -> None:
    """Have all ingresses look at what they share. Those that do not hear this look before long."""
    await _ingresses().ask_all("look_again", timeout_s=_TELL_S)


@functools.cache
def _ingresses() -> ServeHandle:
    context = serve.get_replica_context()
    return ServeHandle(serve.get_deployment_handle(context.deployment, context.app_name))


@serve.deployment
@serve.ingress()
class Ingress(IngressServer):
    """An ingress behind Serve's proxy, with Serve's handles to the engines."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        models: list[ResolvedModel],
        handles: list[DeploymentHandle[Any]],
        settings: IngressSettings,
        model_host: ModelHost | None = None,
    ) -> None:
        begin_replica(keeps_texts=settings.keeps_texts)
        self._cpu_s, self._cpu_at = time.process_time(), time.monotonic()
        node: Any = ray.get_runtime_context()
        place = IngressPlace(
            serve.get_replica_context().app_name,
            node.get_node_id(),
            ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            [ServeHandle(handle) for handle in handles],
            RayStore(),
            _tell_ingresses,
            model_host,
        )
        super().__init__(await open_parts(models, settings, place))
        await self.restore()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.api()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what `serve_app.cluster.autoscaling` learns of this replica."""
        cpu_s, at = self._cpu_s, self._cpu_at
        self._cpu_s, self._cpu_at = time.process_time(), time.monotonic()
        cpu_share = (self._cpu_s - cpu_s) / max(1e-3, self._cpu_at - at)
        open_part = len(self.open_requests) / self.open_requests.limit
        return {PRESSURE: ingress_pressure(open_part, cpu_share)}
