"""Batches: lays out rows for the backend. Pure: no model, no threads, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.base.formats import Row
from serve_app.base.values.adapters import Adapters
from serve_app.engine.core.sequence import PromptSpan, Sequence


class SequenceRows(NamedTuple):
    """The tokens of one sequence in a step: its next ones, and drafted ones behind them."""

    sequence: Sequence
    n_rows: int
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of one batch that belongs to one sequence."""

    sequence: Sequence
    n_rows: int
    """The sequence's own tokens; drafted ones come on top."""
    draft: tuple[int, ...]
    sample_row: int | None
    """Index of the row to sample from, when the chunk completes the tokens; drafted ones follow it."""
    scored: range
    """Indices of the rows that tell how likely the prompt's next tokens are; none if nobody asked."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A call of the backend: rows, and whose they are."""

    rows: list[Row]
    chunks: list[Chunk]
    depth: float
    """Tokens that a row's own sequence has in the cache before the batch, on average."""
    n_cells: int
    """Tokens of all sequences in the cache, if it is unified; else 0."""
    decodes: bool
    prefills: bool
    adapters: Adapters = ()
    span: PromptSpan | None = None
    """The span that its rows belong to: then there is nothing else in it."""
    fillers: tuple[tuple[int, int], ...] = ()
    """Slots between those of the sequences, and positions of rows there that nobody wants and that are
    dropped again. Only beside decoding sequences."""

    def shared_s(self, seconds: float) -> list[float]:
        """Each chunk's share of the seconds that the batch took; fillers are on all."""
        n_rows = [chunk.n_rows + len(chunk.draft) for chunk in self.chunks]
        return [seconds * n / sum(n_rows) for n in n_rows]


def plan_batch(
    turns: Iterable[SequenceRows], n_cells: int = 0, slot_ends: Mapping[int, int] | None = None
) -> Batch:
    """Lay out each sequence's next tokens, and the drafted ones, ordered by slot. There is at least one
    turn, and only one if it is within a span; all have the same adapters; `n_cells` are in use, if the
    cache is unified.

    llama.cpp computes rows of consecutive slots together and splits the batch at every gap or descent,
    hence the order. If `slot_ends` are given, the tokens that each slot has, gaps are filled with a row
    behind them. For decoding sequences, that costs less than to compute what is left and right of a gap
    one after the other.
    """
    rows: list[Row] = []
    chunks: list[Chunk] = []
    ordered = sorted(turns, key=lambda turn: turn.sequence.slot_id)
    fillers: list[tuple[int, int]] = []
    for sequence, n_rows, draft in ordered:
        if chunks and slot_ends is not None:
            between = range(chunks[-1].sequence.slot_id + 1, sequence.slot_id)
            fillers += [(slot_id, slot_ends[slot_id]) for slot_id in between]
            rows += [(0, slot_ends[slot_id], slot_id, False) for slot_id in between]
        end = sequence.n_past + n_rows
        complete = end == len(sequence.tokens)
        slot_id, unscored = sequence.slot_id, sequence.unscored_positions
        first = len(rows) - sequence.n_past
        for position in range(sequence.n_past, end):
            wants_logits = (complete and position == end - 1) or position in unscored
            rows.append((sequence.tokens[position], position, slot_id, wants_logits))
        scored = range(first + unscored.start, first + min(end, unscored.stop))
        chunks.append(Chunk(sequence, n_rows, draft, len(rows) - 1 if complete else None, scored))
        rows += [(token, position, slot_id, True) for position, token in enumerate(draft, end)]
    n_past = sum(turn.n_rows * turn.sequence.n_past for turn in ordered)
    return Batch(
        rows,
        chunks,
        depth=n_past / sum(turn.n_rows for turn in ordered),
        n_cells=n_cells,
        decodes=any(turn.sequence.n_pending == 1 for turn in ordered),
        prefills=any(turn.sequence.n_pending > 1 for turn in ordered),
        adapters=ordered[0].sequence.request.adapters,
        span=ordered[0].sequence.span,
        fillers=tuple(fillers),
    )
