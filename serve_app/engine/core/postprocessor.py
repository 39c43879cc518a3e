"""Applies what batches computed to their sequences, and keeps the events that a step delivers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import CorralError
from serve_app.base.values.answers import FinishReason, Sampled, SequenceEnd, TokenDelta
from serve_app.engine.backends.base import Vocabulary
from serve_app.engine.cache.manager import KVCacheManager
from serve_app.engine.core.batch_runner import BatchResult
from serve_app.engine.core.scheduler.batch import Chunk
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import Sequence, SequenceState, dropped_by_shift
from serve_app.engine.metrics.stats import Counts
from serve_app.engine.metrics.trace import Latencies

# Where nobody reads along, so many tokens are told at once. They are lost with an engine.
_TOGETHER = 16


class Outbox:
    """Deltas that nobody was told of yet, in their order. Deltas that may be `told_together` are: each
    delivery takes others' time. Decoder thread only."""

    def __init__(self) -> None:
        self._deltas: list[tuple[Sequence, TokenDelta]] = []

    def put(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Take a sequence's newest tokens, or its end."""
        if sequence.untold is not None:
            delta = sequence.untold.then(delta)
        sequence.untold = delta if self._waits(sequence, delta) else None
        if sequence.untold is None:
            self._deltas.append((sequence, delta))

    def _waits(self, sequence: Sequence, delta: TokenDelta) -> bool:
        if not sequence.request.told_together or delta.end is not None:
            return False
        return sequence.n_generated > 1 and len(delta.token_ids) < _TOGETHER

    def end(
        self, sequence: Sequence, reason: FinishReason, error: CorralError | None = None
    ) -> None:
        """End a sequence that did not end itself; nothing happens if it has."""
        if not sequence.is_finished:
            self.put(sequence, sequence.finish(reason, error=error))

    @property
    def ends(self) -> Iterator[tuple[Sequence, SequenceEnd]]:
        """The sequences that are to be told their end."""
        return ((one, delta.end) for one, delta in self._deltas if delta.end is not None)

    def take(self) -> list[tuple[Sequence, TokenDelta]]:
        """Take all deltas, and leave none."""
        taken, self._deltas = self._deltas, []
        return taken


@dataclass(slots=True, eq=False)
class Postprocessor:
    """Books the rows of a computed batch, and gives sequences their sampled tokens. Decoder thread only."""

    _options: EngineOptions
    _vocabulary: Vocabulary
    _cache: KVCacheManager
    _outbox: Outbox
    _counts: Counts
    _latencies: Latencies
    _scheduler: Scheduler

    def apply(self, result: BatchResult) -> None:
        """Give each sequence of a batch that was computed its part of the result."""
        self._counts.batches += result.n_passes
        self._counts.busy_slots += result.n_passes * len(result.batch.chunks)
        self._counts.decode_s += result.decode_s
        self._counts.sample_s += result.sample_s
        for chunk, sampled in zip(result.batch.chunks, result.sampled, strict=True):
            if isinstance(sampled, CorralError):
                self.end(chunk, sampled)
            else:
                self._advance(chunk, sampled, result.n_passes)

    def end(self, chunk: Chunk, error: CorralError) -> None:
        """End a sequence that cannot go on, and drop its rows of the batch."""
        self._cache.drop_rows(chunk.sequence)
        self._outbox.end(chunk.sequence, FinishReason.ERROR, error)

    def _advance(self, chunk: Chunk, sampled: list[Sampled], n_passes: int) -> None:
        sequence = chunk.sequence
        sequence.advance(chunk.n_rows)
        if sequence.state is SequenceState.PREFILL:
            self._counts.prompt_tokens += chunk.n_rows
            self._cache.on_progress(sequence)
            if (progress := sequence.progress()) is not None:
                self._outbox.put(sequence, progress)
        if sampled:
            self._accept(chunk, sampled, n_passes)
        elif not sequence.n_pending:
            self._outbox.put(sequence, sequence.stop_at_prompt())

    def _accept(self, chunk: Chunk, sampled: list[Sampled], n_passes: int) -> None:
        sequence, n_ctx_slot = chunk.sequence, self._options.n_ctx_slot
        n_before = sequence.n_generated
        delta = sequence.accept(sampled, self._vocabulary, n_ctx_slot)
        n_taken = sequence.n_generated - n_before
        self._counts.generated_tokens += n_taken
        if not sequence.request.background:  # nobody waits for those
            self._latencies.add("itl_s" if n_before else "ttft_s", sequence.trace.gap_s)
        if chunk.draft:
            self._check_draft(chunk, n_taken, len(sampled) - 1)
        elif n_passes > 1:
            n_fed = min(n_taken, len(sampled) - 1)
            sequence.advance(n_fed)
            if n_fed < n_passes - 1:
                self._cache.drop_rows(sequence)
        self._outbox.put(sequence, delta)
        if (
            len(sequence.tokens) >= n_ctx_slot
            and not sequence.is_finished
            and sequence.n_keep is not None
        ):
            n_discard = dropped_by_shift(sequence.request, n_ctx_slot, sequence.n_keep)
            self._cache.shift(sequence, sequence.n_keep, n_discard)
            self._counts.context_shifts += 1

    def _check_draft(self, chunk: Chunk, n_taken: int, n_confirmed: int) -> None:
        sequence, n_drafted, n_right = chunk.sequence, len(chunk.draft), min(n_taken, n_confirmed)
        sequence.advance(n_right)
        self._counts.drafts += 1
        self._counts.drafted_tokens += n_drafted
        self._counts.accepted_tokens += n_right
        drafts = self._scheduler.drafts
        if drafts is not None and drafts.record(sequence, n_drafted, n_confirmed):
            self._counts.proposed_tokens += n_drafted
            self._counts.accepted_proposed_tokens += n_right
        self._cache.drop_rows(sequence)
