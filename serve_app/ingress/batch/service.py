"""Files and batches of one ingress: the store, and who works by them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.errors import NotSupportedError
from serve_app.ingress.batch.executor import BatchExecutor
from serve_app.ingress.batch.store import BatchLimits, BatchStore

MOST_UPLOADS = 8
"""The most files that one ingress receives at once."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Where they are kept, and how much."""

    folder: Path
    limits: BatchLimits = field(default_factory=BatchLimits)
    max_concurrency: int = 256
    """Lines that are asked for at once."""
    lease_s: float = 15.0
    """A process that dies keeps others from its batches for so long at most."""


class BatchService:
    """The store, and who works by them: None where there is no folder for them."""

    def __init__(
        self, store: BatchStore | None = None, executor: BatchExecutor | None = None
    ) -> None:
        self._store = store
        self._executor = executor
        self.uploads = asyncio.Semaphore(MOST_UPLOADS)

    @property
    def store(self) -> BatchStore:
        """Raises NotSupportedError without a folder."""
        if self._store is None:
            raise NotSupportedError(
                "Files and batches are not configured. Set ingress.batch.folder."
            )
        return self._store

    def wake(self) -> None:
        """There is a new batch."""
        if self._executor is not None:
            self._executor.wake()
