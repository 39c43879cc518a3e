"""The other ingress replicas of this application."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.routing import broadcast

_TELL_S = 2.0


class OtherIngresses:
    """Used in one ingress replica's event loop."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle[Any] | None = None

    async def tell(self) -> None:
        """Something has changed that all ingresses share: they look at it. Those that do not hear this
        look by themselves before long."""
        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        await broadcast.ask_all(self._handle, "look_again", timeout_s=_TELL_S)
