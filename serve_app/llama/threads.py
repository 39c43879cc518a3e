"""The number of threads that compute a batch. Does not load llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass

FEW_ROWS = 16
"""Up to so many rows, a batch mostly waits for memory: it reads all weights and computes little."""


@dataclass(frozen=True, slots=True)
class Threads:
    """Threads by the rows of a batch."""

    one_row: int
    few_rows: int
    """The threads for 2 to FEW_ROWS rows: sequences that decode together, and short ends of prompts."""
    many_rows: int
    reason: str
    """Why, in one line."""

    @classmethod
    def alike(cls, threads: int, threads_batch: int | None) -> Threads:
        """One number for a single row, and one for all other batches; None: the same."""
        batch = threads_batch or threads
        reason = "for every batch" if batch == threads else "as configured"
        return cls(threads, batch, batch, reason)
