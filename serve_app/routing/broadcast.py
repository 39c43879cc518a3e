"""Asks all replicas of a deployment a question, and leaves out those that do not answer in time.

Serve's own `results_async` raises a TimeoutError for a single late replica, and loses what others said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from ray import serve
from ray.serve._private.router import SharedRouterLongPollClient
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("corral.routing")

_SHUTDOWN_S = 1.0

_running: dict[tuple[str, str], frozenset[str]] = {}


def note_running(app: str, deployment: str, replica_ids: Iterable[str]) -> None:
    """Remember who runs. Any thread: Serve tells each process's router."""
    _running[app, deployment] = frozenset(replica_ids)


def running(handle: DeploymentHandle[Any]) -> frozenset[str]:
    """The ids of the replicas behind a handle, as far as this process has been told. Any thread."""
    return _running.get((handle.app_name, handle.deployment_name), frozenset())


@asynccontextmanager
async def handle_for_now(deployment: str, app: str) -> AsyncIterator[DeploymentHandle[Any]]:
    """A handle for as long as the block runs, in a process that has no other one. Afterwards Serve's
    controller sends this process nothing more of that deployment's replicas."""
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(deployment, app)
    try:
        yield handle
    finally:
        try:
            _unsubscribe(handle)
            async with asyncio.timeout(_SHUTDOWN_S):
                await handle.shutdown_async()  # type: ignore[no-untyped-call]
        except Exception:
            logger.exception("A handle to %s stays subscribed", deployment)


def _unsubscribe(handle: DeploymentHandle[Any]) -> None:
    """Not public, as of Serve 2.60, whose `shutdown` ends the handle's metrics only. Of a handle, two
    clients poll the controller: its own until the one that all handles of a process share takes over, and
    that one for ever. A handle that is made later polls by its own."""
    router: Any = handle._router
    if router is not None:
        own = router._asyncio_router.long_poll_client
        shared = SharedRouterLongPollClient.get_or_create(own.host_actor, own.event_loop)
        own.stop()
        shared.long_poll_client.stop()


async def ask_all(
    handle: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float
) -> list[Any]:
    """The replicas' answers within so many seconds, as they come; late ones and failures are left out."""
    answers = _answers(handle, method, arguments, timeout_s)
    return [answer async for answer in answers]


async def ask_one(
    handle: DeploymentHandle[Any], method: str, *arguments: Any, timeout_s: float
) -> Any:
    """The first answer that is not None, as soon as it is there; None if there is none within so many
    seconds. For questions that only one replica answers: others are not waited for. Raises nothing."""
    async with aclosing(_answers(handle, method, arguments, timeout_s)) as answers:
        async for answer in answers:
            if answer is not None:
                return answer
    return None


async def _answers(
    handle: DeploymentHandle[Any], method: str, arguments: tuple[Any, ...], timeout_s: float
) -> AsyncGenerator[Any]:
    deadline = asyncio.get_running_loop().time() + timeout_s
    asked = {
        asyncio.ensure_future(call.get_async()): call
        for call in await _sent(handle, method, arguments, deadline)
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


async def _sent(
    handle: DeploymentHandle[Any], method: str, arguments: tuple[Any, ...], deadline: float
) -> list[Any]:
    """The calls, one for each replica; none if Serve cannot tell in time who runs."""
    try:
        response: Any = handle.broadcast(method, *arguments)
        async with asyncio.timeout_at(deadline):
            # Not public, as of Serve 2.60: what is public waits for all.
            return list(await response._fetch_replica_results_async())
    except (DeploymentUnavailableError, TimeoutError):
        return []
    except Exception as error:  # of any kind, if a replica is lost while Serve sends it
        logger.warning("%s: the replicas cannot be asked: %r.", method, error)
        return []
