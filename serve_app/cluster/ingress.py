"""The ingress as a Serve deployment."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentHandle

from serve_app.base.errors import ConfigError, EngineClosedError
from serve_app.channel.pressure import PRESSURE, ingress_pressure
from serve_app.cluster.deployments import own_http_options, serve_client
from serve_app.cluster.process import begin_replica
from serve_app.cluster.responses import RayStore
from serve_app.cluster.serve_handle import ServeHandle
from serve_app.config.resolved import ResolvedModel
from serve_app.run.ingress import IngressPlace, IngressServer, IngressSettings, open_parts
from serve_app.run.local.http import BACKLOG, DrainingServer, settings_of
from serve_app.server.model_control import ModelHost

_TELL_S = 2.0


async def _tell_ingresses() -> None:
    """Have all ingresses look at what they share. Those that do not hear this look before long."""
    await _ingresses().ask_all("look_again", timeout_s=_TELL_S)


@functools.cache
def _ingresses() -> ServeHandle:
    context = serve.get_replica_context()
    return ServeHandle(serve.get_deployment_handle(context.deployment, context.app_name))


def _own_sockets(http: HTTPOptions) -> list[socket.socket]:
    """Sockets that listen where Serve's proxy would. All ingresses of a node may: the kernel shares
    connections out among them. Blocks. Raises ConfigError if another program listens there."""
    host = http.host or None
    found = socket.getaddrinfo(host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        return [
            socket.create_server(
                (str(host), port),
                family=family,
                backlog=BACKLOG,
                reuse_port=True,
                dualstack_ipv6=http.host == "::" and socket.has_dualstack_ipv6(),
            )
            for family, host, port in sorted({(one[0], *one[4][:2]) for one in found})
        ]
    except OSError as error:
        raise ConfigError(f"Port {http.port} of {http.host}: {error.strerror}") from None


def _check_alone(app: str) -> None:
    """Raises ConfigError unless this application has Serve's port to itself; blocks."""
    endpoints = ray.get(serve_client()._controller.get_all_endpoints.remote())
    routes = {one.app_name: endpoint["route"] for one, endpoint in endpoints.items()}
    if others := {name: route for name, route in routes.items() if (name, route) != (app, "/")}:
        raise ConfigError(
            "proxy_location: Disabled is for one application at /. Remove it for "
            + ", ".join(f"{name} at {route}" for name, route in others.items())
        )


async def _is_only_replaced() -> bool:
    """Whether the application goes on without this ingress, as far as Serve tells."""
    try:
        async with asyncio.timeout(_TELL_S):
            return bool(await _ingresses().replica_states())
    except (EngineClosedError, TimeoutError):
        return False


@asynccontextmanager
async def _answering(server: DrainingServer, sockets: list[socket.socket]) -> AsyncIterator[None]:
    """Inside the block, the server answers at these sockets. At its end, what runs may end: Serve waits for
    as long as the deployment's `graceful_shutdown_timeout_s`."""
    task = asyncio.create_task(server.serve(sockets))
    try:
        yield
    finally:
        if await _is_only_replaced():
            await server.hand_over(sockets)
        else:
            server.drain()
        await task


@serve.deployment
@serve.ingress()
class Ingress(IngressServer):
    """An ingress behind Serve's proxy, or one that listens itself, with Serve's handles to the engines."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        models: list[ResolvedModel],
        handles: list[DeploymentHandle[Any]],
        settings: IngressSettings,
        model_host: ModelHost | None = None,
    ) -> None:
        begin_replica(keeps_texts=settings.keeps_texts)
        self._http = await asyncio.to_thread(own_http_options)
        if self._http is not None:
            await asyncio.to_thread(_check_alone, serve.get_replica_context().app_name)
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
        api = self.api()
        if self._http is not None:
            config = settings_of(api, "", 0, self._http.keep_alive_timeout_s, lifespan="off")
            server = DrainingServer(config, api.state.streams, self.drain, self.drain_s)
            sockets, running = _own_sockets(self._http), api.router.lifespan_context

            @asynccontextmanager
            async def answering(app: FastAPI) -> AsyncIterator[None]:
                async with running(app), _answering(server, sockets):
                    yield

            api.router.lifespan_context = answering
        return api

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's hook: what `serve_app.cluster.autoscaling` learns of this replica."""
        cpu_s, at = self._cpu_s, self._cpu_at
        self._cpu_s, self._cpu_at = time.process_time(), time.monotonic()
        cpu_share = (self._cpu_s - cpu_s) / max(1e-3, self._cpu_at - at)
        open_part = len(self.open_requests) / self.open_requests.limit
        return {PRESSURE: ingress_pressure(open_part, cpu_share)}
