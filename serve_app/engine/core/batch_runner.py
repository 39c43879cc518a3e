"""Decodes the batches of a step, and samples the tokens that follow."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial

from serve_app.engine.autotune.clocks import Clocks
from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.backends.base import Backend
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.scheduler.batch import Batch, Chunk
from serve_app.engine.core.scheduler.fair_queue import FairQueue
from serve_app.engine.health import Progress
from serve_app.errors import ConstraintError, CorralError, DecodeCancelledError, DecodeError
from serve_app.types import Adapters, Sampled

logger = logging.getLogger("corral.engine")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The outcome of one batch: an error, or the sampled tokens of each chunk."""

    batch: Batch
    error: DecodeError | None = None
    """The reason why nothing was computed: see `Backend.decode`."""
    sampled: SequenceOf[list[Sampled] | CorralError] = ()
    """The tokens of each chunk, or the reason why none could be picked: no other sequence ends for it."""
    decode_s: float = 0.0
    sample_s: float = 0.0
    share: float | None = None
    """The part of their time that the threads had, if the costs can be learned from this batch."""


@dataclass(slots=True, eq=False)
class BatchRunner:
    """Has the backend compute one batch, charges it, and learns what it took. Decoder thread only."""

    _backend: Backend
    _costs: CostModel
    _progress: Progress
    _command_queue: CommandQueue
    """The queue that cancels a batch which nobody waits for."""
    _queue: FairQueue
    _adapters: Adapters = ()
    """The adapters of the last batch."""
    _clocks: Clocks = field(init=False)

    def __post_init__(self) -> None:
        setup = self._backend.setup
        self._clocks = Clocks(setup.threads if setup.spins else None)

    def run(self, batch: Batch) -> BatchResult:
        """Decode a batch, and sample behind it. Raises what `Backend.decode` raises if it is broken."""
        began, has_pending_copy = time.monotonic(), bool(self._backend.slots_with_pending_copy)
        self._clocks.begin()
        try:
            switches = self.use_adapters(batch.adapters)
            self._decode(batch)
        except DecodeError as error:
            if isinstance(error, DecodeCancelledError):
                self._charge(batch, time.monotonic() - began)
            return BatchResult(batch, error)
        decoded, (_, share) = time.monotonic(), self._clocks.end(len(batch.rows))
        is_usual = not (has_pending_copy or switches or any(chunk.scored for chunk in batch.chunks))
        self._charge(batch, decoded - began)
        sampled = [self._sample(chunk) for chunk in batch.chunks]
        sample_s = time.monotonic() - decoded
        return BatchResult(
            batch, None, sampled, decoded - began, sample_s, share if is_usual else None
        )

    def _decode(self, batch: Batch) -> None:
        depth = self._costs.attended(batch.depth, batch.n_cells)
        try:
            with (
                self._progress.computing(partial(self._costs.batch_s, len(batch.rows), depth)),
                self._command_queue.computing([chunk.sequence for chunk in batch.chunks]),
            ):
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
            chunk.sequence.trace.computed(computed_s, len(batch.chunks))
            self._queue.charge(chunk.sequence, seconds)

    def learn(self, result: BatchResult) -> None:
        """Learn what a batch took. Its tokens need not wait for that."""
        batch, seconds, share = result.batch, result.decode_s, result.share
        if share is None:
            return
        depth = self._costs.attended(batch.depth, batch.n_cells)
        if not batch.prefills:
            n_sequences = len(batch.chunks) + len(batch.fillers)
            self._costs.observe_decode(n_sequences, len(batch.rows), depth, seconds, share)
        elif len(batch.chunks) == 1 or self._backend.setup.mode.mixes:
            self._costs.observe_prefill(len(batch.rows), depth, seconds, share)

    def _sample(self, chunk: Chunk) -> list[Sampled] | CorralError:
        """Sample behind a chunk. Its client is charged for grammars and log-probabilities, too."""
        began = time.monotonic()
        sampled = sample(chunk)
        seconds = time.monotonic() - began
        self._queue.charge(chunk.sequence, seconds)
        if not (chunk.scored or isinstance(sampled, CorralError)):
            chunk.sequence.sampling_cost.observe(len(sampled), seconds)
        return sampled


def sample(chunk: Chunk) -> list[Sampled] | CorralError:
    """The tokens that follow a chunk: one, and one more for each drafted one that it confirms; none before
    the prompt's end. A failure is returned, not raised, because it is no reason to end other
    sequences: a grammar may allow no token, or a sampler may break."""
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
