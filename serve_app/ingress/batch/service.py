"""Files and batches of one ingress: the books, and who works by them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.errors import NotSupportedError
from serve_app.ingress.batch.books import Books, Limits
from serve_app.ingress.batch.runner import Runner

MOST_UPLOADS = 8
"""The most files that one ingress receives at once."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Where they are kept, and how much."""

    folder: Path
    limits: Limits = field(default_factory=Limits)
    max_concurrency: int = 256
    """Lines that are asked for at once."""
    lease_s: float = 15.0
    """A process that dies keeps others from its batches for so long at most."""


class Service:
    """The books, and who works by them: None where there is no folder for them."""

    def __init__(self, books: Books | None = None, runner: Runner | None = None) -> None:
        self._books = books
        self._runner = runner
        self.uploads = asyncio.Semaphore(MOST_UPLOADS)

    @property
    def books(self) -> Books:
        """Raises NotSupportedError without a folder."""
        if self._books is None:
            raise NotSupportedError(
                "Files and batches are not configured. Set ingress.batch.folder."
            )
        return self._books

    def wake(self) -> None:
        """There is a new batch."""
        if self._runner is not None:
            self._runner.wake()
