"""Decodes the batches of a step, and samples the tokens that follow."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from serve_app.base.errors import ConstraintError, CorralError, DecodeCancelledError, DecodeError
from serve_app.base.values.adapters import Adapters
from serve_app.base.values.answers import Sampled
from serve_app.engine.backends.base import Backend
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.scheduler.batch import Batch, Chunk
from serve_app.engine.costs.cost_model import AHEAD_S, CostModel
from serve_app.engine.health import Progress

logger = logging.getLogger("corral.engine")


@dataclass(slots=True)
class BatchResult:
    """The outcome of one batch: an error, or the sampled tokens of each chunk."""

    batch: Batch
    error: DecodeError | None = None
    """The reason why nothing was computed: see `Backend.decode`."""
    sampled: list[list[Sampled] | CorralError] = field(default_factory=list)
    """The tokens of each chunk, or the reason why none could be picked: no other sequence ends for it."""
    first_s: float = 0.0
    """Seconds of the first pass, without sampling; `decode_s` are those of all."""
    n_passes: int = 1
    """The passes that were begun: the first, and those over the tokens that the pass before brought."""
    decode_s: float = 0.0
    sample_s: float = 0.0
    is_usual: bool = True
    """Whether the costs can be learned from this batch."""


Stream = tuple[Chunk, int, list[Sampled]]
"""A decoding sequence's chunk, its row in the batch, and what was sampled behind it."""


@dataclass(slots=True, eq=False)
class BatchRunner:
    """Has the backend compute one batch, charges it, and learns what it took. Decoder thread only."""

    _backend: Backend
    _costs: CostModel
    _progress: Progress
    _command_queue: CommandQueue
    """The queue that cancels a batch which nobody waits for."""
    _adapters: Adapters = ()
    """The adapters of the last batch."""

    def run(self, batch: Batch, *, ahead: bool = False) -> BatchResult:
        """Decode a batch, and sample behind it. Raises what `Backend.decode` raises if it is broken.

        With `ahead`, short passes over the sampled tokens follow, if the batch has nothing but one token
        of each stream: vLLM calls that multi-step scheduling.
        """
        began, has_pending_copy = time.monotonic(), bool(self._backend.slots_with_pending_copy)
        with self._computing(batch):
            try:
                switches = self.use_adapters(batch.adapters)
                self._decode(batch)
            except DecodeError as error:
                if isinstance(error, DecodeCancelledError):
                    self._charge(batch, time.monotonic() - began)
                return BatchResult(batch, error)
            decoded = time.monotonic()
            is_usual = not (
                has_pending_copy or switches or any(chunk.scored for chunk in batch.chunks)
            )
            result = BatchResult(batch, is_usual=is_usual)
            result.first_s = result.decode_s = decoded - began
            result.sampled = [self._sample(chunk) for chunk in batch.chunks]
            result.sample_s = time.monotonic() - decoded
            ahead = ahead and bool(self._costs) and 2 * result.decode_s < AHEAD_S
            if ahead and (streams := _streams(result)):
                self._run_ahead(result, streams, began + AHEAD_S)
        self._charge(batch, result.decode_s)
        return result

    def _run_ahead(self, result: BatchResult, streams: list[Stream], until: float) -> None:
        """Add passes over the newest tokens while the next one should end by `until`, all streams go on,
        and no other thread wants anything. A pass that fails is left to the next step."""
        batch, rows, now = result.batch, list(result.batch.rows), time.monotonic()
        pass_s = max(result.decode_s, self._forecast_s(batch)) + result.sample_s
        while now + pass_s <= until and self._go_on(streams):
            for _, row, sampled in streams:
                _, position, slot_id, _ = rows[row]
                rows[row] = (sampled[-1].token, position + 1, slot_id, True)
            result.n_passes += 1
            began = now
            try:
                self._decode(replace(batch, rows=rows))
            except DecodeError:
                return
            decoded = time.monotonic()
            for chunk, _, sampled in streams:
                if isinstance(behind := self._sample(chunk), CorralError):
                    return
                sampled += behind
            now = time.monotonic()
            result.decode_s += decoded - began
            result.sample_s += now - decoded
            pass_s = now - began

    def _go_on(self, streams: list[Stream]) -> bool:
        """Whether nobody waits, and each stream has another token to compute, and room behind it."""
        is_eog = self._backend.vocabulary.is_eog
        return not self._command_queue.has_come and all(
            chunk.sequence.draft_room >= len(sampled)
            and not (sampled[-1].complete or is_eog(sampled[-1].token))
            for chunk, _, sampled in streams
        )

    def _forecast_s(self, batch: Batch) -> float:
        depth = self._costs.effective_past(batch.depth, batch.n_cells)
        return self._costs.batch_s(len(batch.rows), depth)

    @contextmanager
    def _computing(self, batch: Batch) -> Iterator[None]:
        with (
            self._progress.computing(partial(self._forecast_s, batch)),
            self._command_queue.computing([chunk.sequence for chunk in batch.chunks]),
        ):
            yield

    def _decode(self, batch: Batch) -> None:
        try:
            if batch.span is None:
                self._backend.decode(batch.rows)
            else:
                batch.span.decode(self._backend, batch.rows)
        finally:
            for slot_id, end in batch.fillers:
                self._backend.truncate(slot_id, end)

    def use_adapters(self, adapters: Adapters) -> bool:
        """Have the next batches computed with these adapters; returns whether that is a change."""
        loaded = self._backend.adapters
        if loaded is None or adapters == self._adapters:
            return False
        loaded.use(adapters)
        self._adapters = adapters
        return True

    def _charge(self, batch: Batch, computed_s: float) -> None:
        for chunk, seconds in zip(batch.chunks, batch.shared_s(computed_s), strict=True):
            chunk.sequence.trace.on_batch(computed_s, len(batch.chunks))
            self._command_queue.policy.charge(chunk.sequence, seconds)

    def learn(self, result: BatchResult) -> None:
        """Learn what a batch took. Its tokens need not wait for that."""
        batch, seconds = result.batch, result.first_s
        if not result.is_usual:
            return
        depth = self._costs.effective_past(batch.depth, batch.n_cells)
        if not batch.prefills:
            n_sequences = len(batch.chunks) + len(batch.fillers)
            self._costs.observe_decode(n_sequences, len(batch.rows), depth, seconds)
        elif len(batch.chunks) == 1 or self._backend.cache_plan.mode.mixes:
            self._costs.observe_prefill(len(batch.rows), depth, seconds)

    def _sample(self, chunk: Chunk) -> list[Sampled] | CorralError:
        """Sample behind a chunk. Its client is charged for grammars and log-probabilities, too."""
        began = time.monotonic()
        sampled = sample(chunk)
        self._command_queue.policy.charge(chunk.sequence, time.monotonic() - began)
        return sampled


def _streams(result: BatchResult) -> list[Stream]:
    """The streams of a batch that has nothing but their newest tokens; empty for other batches."""
    streams = [
        (chunk, chunk.sample_row, sampled)
        for chunk, sampled in zip(result.batch.chunks, result.sampled, strict=True)
        if chunk.n_rows == 1 and chunk.sample_row is not None and not chunk.draft
        if chunk.sequence.n_generated and not isinstance(sampled, CorralError)
    ]
    return streams if len(streams) == len(result.batch.chunks) else []


def sample(chunk: Chunk) -> list[Sampled] | CorralError:
    """The tokens that follow a chunk: one, and one more for each drafted one that it confirms; none before
    the prompt's end. A failure is returned, not raised, because it is no reason to end other sequences. A
    grammar may allow no token, or a sampler may break."""
    try:
        if chunk.scored:
            chunk.sequence.score(chunk.scored)
        if chunk.sample_row is None or chunk.sequence.n_left == 0:
            return []
        sampler = chunk.sequence.sampler
        sampled = [sampler.sample(chunk.sample_row)]
        for row, drafted in enumerate(chunk.draft, chunk.sample_row + 1):
            if sampled[-1].token != drafted or sampled[-1].complete:
                break
            sampled.append(sampler.sample(row))
        return sampled
    except ConstraintError as error:
        return error
    except Exception as error:
        logger.exception("The sampler of %s broke.", chunk.sequence.id)
        return DecodeError(f"No token could be picked: {error}")
