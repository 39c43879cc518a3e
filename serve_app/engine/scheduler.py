"""Which rows go into the next batch. Pure: no model, no threads, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.engine.backend import Row
from serve_app.engine.cost_model import CostModel
from serve_app.engine.sequence import Sequence

# Of the stall budget, for passes that take a little longer than predicted, and for sampling.
_MARGIN = 0.92


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one step that belongs to one sequence."""

    sequence: Sequence
    n_rows: int
    sample_row: int | None
    """Index of the row to sample from, when this chunk completes the sequence's tokens."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One call of the backend: rows, and whose they are."""

    rows: list[Row]
    chunks: list[Chunk]


class Scheduler:
    """Plans steps over the running sequences: a pass over every decoding one's next token, then a
    pass over at most `n_batch` prompt tokens.

    While sequences decode, prompts get as much of a step as keeps it within `max_stall_s`, by the
    cost model: so long at most a stream waits between two tokens. Where decoding alone takes more
    than half of that, prompts may take as long as it takes; and one of them always gets on.

    Prompts have the oldest turn first, as much as each can use. Whoever was served goes to the back,
    so prompts that do not fit take turns, and a long one does not hold up the short ones behind it.
    """

    def __init__(
        self, n_batch: int, costs: CostModel | None = None, max_stall_s: float | None = None
    ) -> None:
        """Without a cost model or without a bound, only `n_batch` limits the prompts."""
        self._n_batch = n_batch
        self._costs = costs
        self._max_stall_s = max_stall_s
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

    def schedule(self) -> list[Pass]:
        """Plan the next step: empty if nothing runs. Moves whoever is served to the back."""
        decoding = [(sequence, 1) for sequence in self._turns if sequence.n_pending == 1]
        prompts = self._prompts(len(decoding))
        for sequence, _ in decoding + prompts:
            self._turns.remove(sequence)
            self._turns.append(sequence)
        return [plan_pass(served) for served in (decoding, prompts) if served]

    def _prompts(self, n_decoding: int) -> list[tuple[Sequence, int]]:
        """Which prompts get on in this step, and by how many rows."""
        costs = self._costs if n_decoding and self._max_stall_s is not None else None
        spent_s = decode_s = costs.decode_s(n_decoding) if costs else 0.0
        within_s = max(_MARGIN * (self._max_stall_s or 0.0), 2 * decode_s)
        left = self._n_batch
        served: list[tuple[Sequence, int]] = []
        for sequence in self._turns:
            if sequence.n_pending == 1 or left == 0:
                continue
            n_rows = min(left, sequence.n_pending)
            if costs:
                n_rows = costs.chunk(
                    n_rows, sequence.n_past, beside_s=spent_s, within_s=within_s
                ) or (0 if served else costs.smallest_chunk(n_rows))
                spent_s += costs.prefill_s(n_rows, sequence.n_past)
            if n_rows == 0:
                break
            served.append((sequence, n_rows))
            left -= n_rows
        return served


def plan_pass(served: Iterable[tuple[Sequence, int]]) -> Pass:
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
    return Pass(rows, chunks)
