"""The way to the replicas of one deployment: a handle of Serve, or the socket of a local process."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from serve_app.base.errors import CorralError, EngineUnavailableError
from serve_app.base.values.replicas import FetchingReplica


class ReplicaCall(Protocol):
    """A call of one replica's method. Awaiting it gives what the method returns, and raises CorralErrors
    only: EngineFailedError if the replica is lost. Cancelling the wait cancels the call."""

    def __await__(self) -> Generator[Any, None, Any]: ...

    def cancel(self) -> object:
        """Have the call end if it has not. Raises nothing."""


class ReplicaHandle(Protocol):
    """The replicas of one deployment. Used in one event loop."""

    def call(self, method: str, *arguments: Any) -> ReplicaCall:
        """Call a method of the replica that answers soonest. The call waits for a replica if none runs."""

    @property
    def failure(self) -> CorralError | None:
        """The reason why no replica can be started, as far as this process knows."""

    def running(self) -> frozenset[str]:
        """The ids of the replicas that run, as far as this process knows."""

    async def ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """The replicas' answers within so many seconds; late ones and failures are left out."""

    async def ask_one(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The first answer that is not None; None if there is none within so many seconds."""

    async def replica_states(self) -> dict[str, int]:
        """The number of replicas in each state: see EngineClient. Nothing if nobody knows. Raises
        EngineClosedError if the application is being stopped."""

    async def fetching(self) -> Sequence[FetchingReplica]:
        """The replicas that fetch their model now. Raises whatever keeps this from being known."""


class NoReplicas:
    """The ReplicaHandle of a model that is left out. Calls raise EngineUnavailableError."""

    def __init__(self, reason: str) -> None:
        self.failure = EngineUnavailableError(reason)

    def call(self, method: str, *arguments: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self._refuse())

    async def _refuse(self) -> None:
        raise EngineUnavailableError(*self.failure.args)

    def running(self) -> frozenset[str]:
        return frozenset()

    async def ask_all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        return []

    async def ask_one(self, method: str, *arguments: Any, timeout_s: float) -> None:
        """No replica has an answer."""

    async def replica_states(self) -> dict[str, int]:
        return {}

    async def fetching(self) -> Sequence[FetchingReplica]:
        return ()
