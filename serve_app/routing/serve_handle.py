"""The replicas of a deployment behind a handle of Serve's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from serve_app.errors import (
    CorralError,
    EngineClosedError,
    EngineFailedError,
    EngineUnavailableError,
    QueueFullError,
)
from serve_app.routing import broadcast
from serve_app.store.shared_entries import fetching_replicas
from serve_app.types import FetchingReplica

_LEAVING_S = 1.0
"""When a client leaves, Serve cancels what its request has called, and then the request: the second comes
within so many seconds of the first."""


class ServeCall:
    """A ReplicaCall over a handle of Serve's."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._outcome().__await__()

    async def _outcome(self) -> Any:
        try:
            return await self._response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            await asyncio.sleep(
                _LEAVING_S
            )  # nobody asks another replica for a client that has left
            raise EngineFailedError("The engine replica cancelled the request.") from None
        except CorralError:
            raise
        except Exception as error:  # of any kind, if a replica is lost while Serve chooses it
            raise _translated(error) from error

    def cancel(self) -> None:
        with suppress(
            Exception
        ):  # where no replica took it, Serve raises once more what it failed with
            self._response.cancel()


class ServeHandle:
    """A ReplicaHandle over a handle of Serve's, whose router chooses the replica of a call."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    def call(self, method: str, *arguments: Any) -> ServeCall:
        return ServeCall(getattr(self._handle, method).remote(*arguments))

    def running(self) -> frozenset[str]:
        return broadcast.running(self._handle)

    async def ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return await broadcast.ask_all(self._handle, method, *arguments, timeout_s=timeout_s)

    async def ask_one(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        return await broadcast.ask_one(self._handle, method, *arguments, timeout_s=timeout_s)

    async def replica_states(self) -> dict[str, int]:
        """The numbers of replicas by Serve's controller; nothing if that is away."""
        try:
            status = await asyncio.to_thread(serve.status)
        except RayError:
            return {}
        application = status.applications.get(self._handle.app_name)
        if application is None or application.status == ApplicationStatus.DELETING:
            raise EngineClosedError("The application is being stopped.")
        deployment = application.deployments.get(self._handle.deployment_name)
        # Serve's model keeps the names of its states, and not the states that its types promise.
        return {} if deployment is None else cast(dict[str, int], deployment.replica_states)

    async def fetching(self) -> Sequence[FetchingReplica]:
        names = self._handle.app_name, self._handle.deployment_name
        return await asyncio.to_thread(fetching_replicas, *names)


@asynccontextmanager
async def handle_for_now(deployment: str, app: str) -> AsyncIterator[ServeHandle]:
    """A handle for as long as the block runs: see broadcast.handle_for_now."""
    async with broadcast.handle_for_now(deployment, app) as handle:
        yield ServeHandle(handle)


def _translated(error: Exception) -> CorralError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CorralError):
        return cause
    if isinstance(cause, BackPressureError):
        return QueueFullError("All replicas and their queues are full.", 1)
    if isinstance(cause, DeploymentUnavailableError):
        return EngineUnavailableError("No engine of this model is up.")
    return EngineFailedError(f"The engine replica failed ({type(cause).__name__}).")
