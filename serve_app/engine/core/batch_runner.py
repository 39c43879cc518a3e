"""Computes the batches of a step."""

from __future__ import annotations

import logging
import time

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.backends.adapter_turns import AdapterTurns
from serve_app.engine.backends.base import Backend
from serve_app.engine.core.admission import Admission
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.decode.sampling import sample
from serve_app.engine.core.outbox import Outbox
from serve_app.engine.core.scheduler.batch import Batch, Chunk, Turn, plan_batch
from serve_app.engine.core.scheduler.fair_queue import FairQueue
from serve_app.engine.core.sequence import SequenceState
from serve_app.engine.drafts.drafter import Drafter
from serve_app.engine.health import Progress
from serve_app.engine.kv_cache.manager import KVCacheManager
from serve_app.engine.kv_cache.shifts import context_shift
from serve_app.engine.metrics.latencies import Latencies
from serve_app.engine.metrics.stats import Counts
from serve_app.engine.options import EngineOptions
from serve_app.errors import (
    CacheFullError,
    CorralError,
    DecodeCancelledError,
    DecodeError,
    EngineFailedError,
)
from serve_app.types import Adapters, FinishReason, Sampled

logger = logging.getLogger("corral.engine")

# Steps in a row in which nothing could be decoded, after which the backend counts as broken.
_MAX_FAILED_STEPS = 3


class BatchRunner:
    """Decodes a batch, samples what follows, and gives it to the sequences. Decoder thread only."""

    def __init__(
        self,
        options: EngineOptions,
        backend: Backend,
        cache: KVCacheManager,
        costs: CostModel,
        admission: Admission,
        waiting: FairQueue,
        command_queue: CommandQueue,
        outbox: Outbox,
        counts: Counts,
        latencies: Latencies,
        progress: Progress,
        adapter_turns: AdapterTurns,
        drafter: Drafter | None = None,
    ) -> None:
        """`waiting` charges clients; `command_queue` is told who a batch is for."""
        self._options = options
        self._backend = backend
        self._cache = cache
        self._costs = costs
        self._admission = admission
        self._waiting = waiting
        self._command_queue = command_queue
        self._outbox = outbox
        self._counts = counts
        self._latencies = latencies
        self._progress = progress
        self._adapter_turns = adapter_turns
        self._drafter = drafter
        self._failed_steps = 0
        self._adapters: Adapters = ()
        """Those of the last batch."""

    def attempt(self, planned: Batch) -> bool:
        """Carry out a batch; False if the others of the step are to be planned anew. Raises
        EngineFailedError if it is never one sequence's fault that nothing can be decoded."""
        try:
            self._forward(planned)
        except CacheFullError as error:
            return self._make_room(planned, error)
        except DecodeCancelledError:
            return self._forget(planned)
        except DecodeError:
            return self._retry_one_by_one(planned)
        return True

    def _forward(self, plan: Batch) -> None:
        began = time.monotonic()
        settled = self._cache.settled
        depth = self._costs.attended(plan.depth, plan.n_cells)
        switches = self.use_adapters(plan.adapters)
        try:
            with (
                self._progress.computing(self._costs.batch_s(len(plan.rows), depth)),
                self._command_queue.computing(chunk.sequence.id for chunk in plan.chunks),
            ):
                self._decode(plan)
        except DecodeCancelledError:
            self._charge(plan, time.monotonic() - began)
            raise
        finally:
            for slot_id, end in plan.fillers:
                self._backend.truncate(slot_id, end)
        decoded = time.monotonic()
        self._adapter_turns.observe(len(plan.rows), decoded - began, switched=switches)
        if settled and not switches and not any(chunk.scored for chunk in plan.chunks):
            self._learn(plan, decoded - began)
        self._counts.batches += 1
        self._counts.busy_slots += len(plan.chunks)
        self._charge(plan, decoded - began)
        sampled = [self._sample(chunk) for chunk in plan.chunks]
        self._counts.decode_s += decoded - began
        self._counts.sample_s += time.monotonic() - decoded
        self._failed_steps = 0
        for chunk, found in zip(plan.chunks, sampled, strict=True):
            if isinstance(found, CorralError):
                self._end(chunk, found)
            else:
                self._advance(chunk, found)

    def _decode(self, plan: Batch) -> None:
        placed = plan.tile
        if placed is None or placed.embeddings is None:
            self._backend.decode(plan.rows)
            return
        first = plan.rows[0][1] - placed.start
        embeddings = placed.embeddings[first : first + len(plan.rows)]
        self._backend.decode_tile(plan.rows, embeddings, placed.tile, first)

    def use_adapters(self, adapters: Adapters) -> bool:
        """Have the next batches computed with these. Whether that is a change."""
        changes = adapters != self._adapters
        if changes:
            self._backend.use_adapters(adapters)
            self._adapters = adapters
        return changes

    def _charge(self, plan: Batch, computed_s: float) -> None:
        for chunk, seconds in zip(plan.chunks, plan.shared_s(computed_s), strict=True):
            chunk.sequence.trace.computed(computed_s, len(plan.chunks))
            self._waiting.charge(chunk.sequence, seconds)

    def _learn(self, plan: Batch, seconds: float) -> None:
        depth = self._costs.attended(plan.depth, plan.n_cells)
        if not plan.prefills:
            n_sequences = len(plan.chunks) + len(plan.fillers)
            self._costs.observe_decode(n_sequences, len(plan.rows), depth, seconds)
        elif len(plan.chunks) == 1 or self._backend.mode.mixes:
            self._costs.observe_prefill(len(plan.rows), depth, seconds)

    def _sample(self, chunk: Chunk) -> list[Sampled] | CorralError:
        """See `sample`: its client is charged for grammars and log-probabilities, too."""
        began = time.monotonic()
        sampled = sample(chunk)
        seconds = time.monotonic() - began
        self._waiting.charge(chunk.sequence, seconds)
        if not (chunk.scored or isinstance(sampled, CorralError)):
            chunk.sequence.sampling_cost.observe(len(sampled), seconds)
        return sampled

    def _advance(self, chunk: Chunk, sampled: list[Sampled]) -> None:
        """Book what a sequence computed, and take its sampled tokens."""
        sequence, n_ctx_slot = chunk.sequence, self._options.n_ctx_slot
        sequence.advance(chunk.n_rows)
        if sequence.state is SequenceState.PREFILL:
            self._counts.prompt_tokens += chunk.n_rows
            self._cache.computed(sequence)
            if (progress := sequence.progress()) is not None:
                self._outbox.put(sequence, progress)
        if not sampled:
            if not sequence.n_pending:
                self._outbox.put(sequence, sequence.stop_at_prompt())
            return
        n_before = sequence.n_generated
        n_keep = context_shift.n_kept(sequence.request, self._options)
        shifts = n_keep is not None
        delta = sequence.accept(sampled, self._backend.vocabulary, n_ctx_slot, shifts=shifts)
        n_taken = sequence.n_generated - n_before
        self._counts.generated_tokens += n_taken
        if not sequence.request.background:  # nobody waits for those
            self._latencies.add("itl_s" if n_before else "ttft_s", sequence.trace.gap_s)
        if chunk.draft:
            self._check_draft(chunk, n_taken, len(sampled) - 1)
        self._outbox.put(sequence, delta)
        full = len(sequence.tokens) >= n_ctx_slot
        if n_keep is not None and full and not sequence.finished:
            n_discard = context_shift.n_dropped(sequence.request, n_ctx_slot, n_keep)
            self._cache.shift(sequence, n_keep, n_discard)
            self._counts.context_shifts += 1

    def _check_draft(self, chunk: Chunk, n_taken: int, n_confirmed: int) -> None:
        """Keep the rows of confirmed drafts, whose tokens were taken, and drop the others."""
        sequence, n_right = chunk.sequence, min(n_taken, n_confirmed)
        sequence.advance(n_right)
        self._counts.drafts += 1
        if self._drafter is not None and self._drafter.record(
            sequence, len(chunk.draft), n_confirmed
        ):
            self._counts.proposed_tokens += len(chunk.draft)
            self._counts.accepted_proposed_tokens += n_right
        else:
            sequence.proposer.record(len(chunk.draft), n_confirmed)
        self._counts.drafted_tokens += len(chunk.draft)
        self._counts.accepted_tokens += n_right
        self._cache.drop_rows(sequence)

    # -- when a batch was not computed ------------------------------------------------------------

    def _make_room(self, plan: Batch, error: CacheFullError) -> bool:
        if not self._admission.make_room():
            self._outbox.end(plan.chunks[0].sequence, FinishReason.ERROR, error)
        return False

    def _forget(self, plan: Batch) -> bool:
        """The batch was cancelled, as nobody waits for it: some rows may be in the cache. The next step
        ends its sequences, or serves who has come first."""
        for chunk in plan.chunks:
            self._cache.drop_rows(chunk.sequence)
        return False

    def _retry_one_by_one(self, plan: Batch) -> bool:
        """The batch failed: decode each sequence alone, so that only the one at fault ends."""
        failed_before, self._failed_steps = self._failed_steps, self._failed_steps + 1
        if failed_before == _MAX_FAILED_STEPS:
            raise EngineFailedError(f"Nothing could be decoded in {failed_before} steps.")
        for chunk in plan.chunks:
            if not self._cache.drop_rows(chunk.sequence):
                continue
            alone = plan_batch([Turn(chunk.sequence, chunk.n_rows)])
            try:
                self._forward(alone)
            except CacheFullError as error:
                return self._make_room(alone, error)
            except DecodeCancelledError:
                return self._forget(alone)
            except DecodeError as error:
                logger.error("Request %s cannot be decoded: %s", chunk.sequence.id, error)
                self._end(chunk, error)
        return True

    def _end(self, chunk: Chunk, error: CorralError) -> None:
        self._cache.drop_rows(chunk.sequence)
        self._outbox.end(chunk.sequence, FinishReason.ERROR, error)
