"""Which rows go into the next batch. Pure: no model, no threads, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.engine.backend import Row
from serve_app.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one step that belongs to one sequence."""

    sequence: Sequence
    n_rows: int
    sample_row: int | None
    """Index of the row to sample from, when this chunk completes the sequence's tokens."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's batch."""

    rows: list[Row]
    chunks: list[Chunk]


class Scheduler:
    """Plans steps over the running sequences: every decoding one's next token, and at most `n_batch`
    prompt tokens.

    Prompts have the oldest turn first, as much as each can use. Whoever was served goes to the back,
    so prompts that do not fit take turns, and a long one does not hold up the short ones behind it.
    """

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._turns: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        """A sequence got a slot; it is served in the next step if there is room."""
        self._turns.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._turns.remove(sequence)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that have a slot, oldest turn first."""
        return tuple(self._turns)

    def schedule(self) -> StepPlan:
        """Plan the next step: empty if nothing runs. Moves whoever is served to the back."""
        budget = self._n_batch
        served = [(sequence, 1) for sequence in self._turns if sequence.n_pending == 1]
        for sequence in self._turns:
            if sequence.n_pending == 1:
                continue
            if budget == 0:
                break
            n_rows = min(budget, sequence.n_pending)
            served.append((sequence, n_rows))
            budget -= n_rows
        for sequence, _ in served:
            self._turns.remove(sequence)
            self._turns.append(sequence)
        return plan_step(served)


def plan_step(served: Iterable[tuple[Sequence, int]]) -> StepPlan:
    """Lay out the next `n_rows` tokens of each sequence, ordered by slot.

    llama.cpp computes rows of consecutive lanes together and splits the batch at every gap or
    descent, hence the order.
    """
    rows: list[Row] = []
    chunks: list[Chunk] = []
    for sequence, n_rows in sorted(served, key=lambda pair: pair[0].slot_id):
        start, end = sequence.n_past, sequence.n_past + n_rows
        complete = end == len(sequence.tokens)
        for position in range(start, end):
            rows.append(
                (
                    sequence.tokens[position],
                    position,
                    sequence.slot_id,
                    complete and position == end - 1,
                )
            )
        chunks.append(Chunk(sequence, n_rows, len(rows) - 1 if complete else None))
    return StepPlan(rows, chunks)
