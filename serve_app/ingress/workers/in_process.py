"""A stand-in for workers that reads bodies in this process, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from serve_app.ingress.http import request_context, request_model
from serve_app.ingress.workers.worker import Models

T = TypeVar("T")


class InProcess:
    """See Workers. For tests, and for those who send to themselves: nothing is bounded here."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def run(self, client: str, work: Callable[[Models, bytes], T], *pieces: bytes) -> T:
        """See Workers."""
        with request_model.ignored_fields() as ignored:
            made = work(self._models, b"".join(pieces))
        request_context.current().ignored += ignored
        return made
