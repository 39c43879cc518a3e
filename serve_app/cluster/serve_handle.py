"""The replicas of a deployment behind a handle of Serve's.

Serve's own `results_async` raises a TimeoutError for a single late replica, and loses what others said. So
a question to all replicas leaves out those that do not answer in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, cast

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve._private.router import SharedRouterLongPollClient
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from serve_app.base.errors import (
    CorralError,
    EngineClosedError,
    EngineFailedError,
    EngineUnavailableError,
    QueueFullError,
)
from serve_app.base.values.replicas import FetchingReplica
from serve_app.store.shared_entries import fetching_replicas, whole_application

logger = logging.getLogger("corral.routing")

_SHUTDOWN_S = 1.0
_LEAVING_S = 1.0
"""The longest time between Serve's two cancellations when a client leaves: of the calls of its request, and
then of the request."""

_running: dict[tuple[str, str], frozenset[str]] = {}


def note_running(app: str, deployment: str, replica_ids: Iterable[str]) -> None:
    """Remember who runs. Any thread: Serve tells each process's router."""
    _running[app, deployment] = frozenset(replica_ids)


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
                self.cancel()  # Serve does it by itself only for requests that came by its proxies
                raise
            await asyncio.sleep(_LEAVING_S)  # so that a client that has left gets no other replica
            raise EngineFailedError("The engine replica cancelled the request.") from None
        except CorralError:
            raise
        except Exception as error:  # of any kind, if a replica is lost while Serve chooses it
            raise _translate(error) from error

    def cancel(self) -> None:
        response = self._response
        with suppress(Exception):  # Serve raises it once more if no replica took the call
            taken = response._replica_result_future
            # Serve 2.60 leaves a replica alone that has just taken the call, and was not awaited since.
            if taken.done() and not taken.cancelled():
                response._replica_result = taken.result()
            response.cancel()


class ServeHandle:
    """A ReplicaHandle over a handle of Serve's, whose router chooses the replica of a call."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    def call(self, method: str, *arguments: Any) -> ServeCall:
        return ServeCall(getattr(self._handle, method).remote(*arguments))

    @property
    def failure(self) -> None:
        """Serve does not say why a replica cannot be started: it tries again."""

    def running(self) -> frozenset[str]:
        """The ids of the replicas that run, as far as this process has been told. Any thread."""
        return _running.get((self._handle.app_name, self._handle.deployment_name), frozenset())

    async def ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return [answer async for answer in self._answers(method, arguments, timeout_s)]

    async def ask_one(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The first answer that is not None, as soon as it is there; None if there is none within so many
        seconds. For questions that only one replica answers: others are not waited for. Raises nothing."""
        async with aclosing(self._answers(method, arguments, timeout_s)) as answers:
            async for answer in answers:
                if answer is not None:
                    return answer
        return None

    async def _answers(
        self, method: str, arguments: tuple[Any, ...], timeout_s: float
    ) -> AsyncGenerator[Any]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        asked = {
            asyncio.ensure_future(call.get_async()): call
            for call in await self._send(method, arguments, deadline)
        }
        waiting = set(asked)
        try:
            while waiting:
                left_s = max(0.0, deadline - asyncio.get_running_loop().time())
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    return
                for answer in done:
                    if not answer.cancelled() and answer.exception() is None:
                        yield answer.result()
        finally:
            for answer in waiting:
                answer.cancel()
                with suppress(Exception):  # or questions pile up at a replica that does not answer
                    asked[answer].cancel()

    async def _send(
        self, method: str, arguments: tuple[Any, ...], deadline: float
    ) -> Sequence[Any]:
        """The calls, one for each replica; none if Serve cannot tell in time who runs."""
        try:
            response: Any = self._handle.broadcast(method, *arguments)
            async with asyncio.timeout_at(deadline):
                # Not public, as of Serve 2.60: what is public waits for all.
                return tuple(await response._fetch_replica_results_async())
        except (DeploymentUnavailableError, TimeoutError):
            return ()
        except Exception as error:  # of any kind, if a replica is lost while Serve sends it
            logger.warning("%s: the replicas cannot be asked: %r.", method, error)
            return ()

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
        app = whole_application(self._handle.app_name)
        return await asyncio.to_thread(fetching_replicas, app, self._handle.deployment_name)


@asynccontextmanager
async def handle_for_now(deployment: str, app: str) -> AsyncIterator[ServeHandle]:
    """A handle for as long as the block runs, in a process that has no other one. Afterwards Serve's
    controller sends this process nothing more of that deployment's replicas."""
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(deployment, app)
    try:
        yield ServeHandle(handle)
    finally:
        try:
            _unsubscribe(handle)
            async with asyncio.timeout(_SHUTDOWN_S):
                await handle.shutdown_async()  # type: ignore[no-untyped-call]
        except Exception:
            logger.exception("A handle to %s stays subscribed", deployment)


def _unsubscribe(handle: DeploymentHandle[Any]) -> None:
    """End the polls of a handle. Serve 2.60 has no public way: its `shutdown` ends the metrics only. Two
    clients poll the controller: its own until the one that all handles of a process share takes over, and
    that one for ever. A handle that is made later polls by its own."""
    router: Any = handle._router
    if router is not None:
        own = router._asyncio_router.long_poll_client
        shared = SharedRouterLongPollClient.get_or_create(own.host_actor, own.event_loop)
        own.stop()
        shared.long_poll_client.stop()


def _translate(error: Exception) -> CorralError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CorralError):
        return cause
    if isinstance(cause, BackPressureError):
        return QueueFullError("All replicas and their queues are full.", 1)
    if isinstance(cause, DeploymentUnavailableError):
        return EngineUnavailableError("No engine of this model is up.")
    return EngineFailedError(f"The engine replica failed ({type(cause).__name__}).")
