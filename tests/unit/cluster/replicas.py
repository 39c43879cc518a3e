"""A handle whose replicas answer when a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

from serve_app.base.errors import CorralError


class Call:
    """One replica's part of a broadcast, as Serve 2.60 gives it (`ReplicaResult`)."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.left = False
        self._failure: Exception | None = None

    def fail(self, failure: Exception) -> None:
        """Let one that is late fail now."""
        self._failure = failure
        self._answer.set()

    async def get_async(self) -> Any:
        if isinstance(self._answer, asyncio.Event):  # it is late
            await self._answer.wait()
            self._answer = self._failure
        if isinstance(self._answer, BaseException) and not isinstance(self._answer, CorralError):
            raise self._answer
        return self._answer

    def cancel(self) -> None:
        self.left = True


class Broadcast:
    """What `DeploymentHandle.broadcast` returns."""

    def __init__(self, calls: list[Call] | BaseException | None) -> None:
        self._calls = calls

    async def _fetch_replica_results_async(self) -> list[Call]:
        if self._calls is None:
            await asyncio.Event().wait()
        if isinstance(self._calls, BaseException):
            raise self._calls
        return list(self._calls or ())


class Handle:
    """Its replicas give these answers, one each; an exception is raised, unless it is Corral's own, and an
    event waited for. Without a list, what Serve raises instead of sending anything; with None, it never
    sends anything."""

    app_name, deployment_name = "app", "engines"

    def __init__(self, answers: list[Any] | BaseException | None) -> None:
        self._answers = answers
        self.asked: list[tuple[Any, ...]] = []
        self.calls: list[Call] = []

    def options(self, **_: Any) -> Handle:
        return self

    def broadcast(self, method: str, *arguments: Any) -> Broadcast:
        self.asked.append((method, *arguments))
        if not isinstance(self._answers, list):
            return Broadcast(self._answers)
        self.calls = [Call(answer) for answer in self._answers]
        return Broadcast(self.calls)
