"""Files and batches of one ingress: the store, and who works by them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from serve_app.errors import NotSupportedError
from serve_app.ingress.access.limits.bodies import BodyLimits, BodyReader
from serve_app.ingress.batch.executor import BatchExecutor
from serve_app.ingress.batch.store import BatchLimits, BatchStore

MOST_UPLOADS, MOST_UPLOADS_EACH = 32, 4
"""The most files that one ingress receives at once, and those of one client."""
UPLOAD_S = 3600.0
"""The longest time that a file may take to arrive."""
_FORM_BYTES = 64 * 2**10
"""The most bytes of an upload besides the file."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The folder of files and batches, and their limits."""

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
        max_file_bytes = 0 if store is None else store.limits.max_file_bytes
        self.uploads = BodyReader(
            BodyLimits(
                MOST_UPLOADS,
                max_each=MOST_UPLOADS_EACH,
                max_bytes=max_file_bytes + _FORM_BYTES,
                timeout_s=UPLOAD_S,
            )
        )

    @property
    def store(self) -> BatchStore:
        """Raises NotSupportedError without a folder."""
        if self._store is None:
            raise NotSupportedError(
                "Files and batches are not configured. Set ingress.batch.folder."
            )
        return self._store

    def wake(self) -> None:
        """Have the executor look for a new batch."""
        if self._executor is not None:
            self._executor.wake()
