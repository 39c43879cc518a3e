"""The decoder thread: the only one that touches the backend."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.autotune.quiet_trials import QuietTrials
from serve_app.engine.autotune.sampling_costs import SamplingCosts
from serve_app.engine.backends.adapters import EngineAdapters
from serve_app.engine.backends.base import Backend
from serve_app.engine.cache_change import CacheChange
from serve_app.engine.core.admission import Admission
from serve_app.engine.core.batch_runner import BatchRunner
from serve_app.engine.core.command_queue import CommandQueue, PendingCommands
from serve_app.engine.core.commands import Command
from serve_app.engine.core.outbox import Outbox
from serve_app.engine.core.scheduler.accounts import Accounts
from serve_app.engine.core.scheduler.backlog import Backlog
from serve_app.engine.core.scheduler.fair_queue import FairQueue
from serve_app.engine.core.scheduler.queue_capacity import QueueCapacity
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.drafts.drafter import Drafter
from serve_app.engine.embedding import EmbeddingQueue, Texts
from serve_app.engine.health import Progress
from serve_app.engine.kv_cache.disk_tier import DiskTier
from serve_app.engine.kv_cache.opening import open_cache
from serve_app.engine.metrics.latencies import Latencies
from serve_app.engine.metrics.published import Published, View
from serve_app.engine.metrics.request_log import RequestLog
from serve_app.engine.metrics.snapshot import engine_stats
from serve_app.engine.metrics.stats import CachedPrefixes, CachedPrompt, Counts, EngineStats
from serve_app.engine.options import EngineOptions
from serve_app.engine.pictures.encoding import Encoding
from serve_app.errors import (
    CorralError,
    EngineClosedError,
    EngineFailedError,
)
from serve_app.types import FinishReason, RequestRecord, SequenceEnd, adapters_of

logger = logging.getLogger("corral.engine")

# Requests in the background that may wait or run, for each slot: enough to fill them, and the next ones.
BACKGROUND_PLACES = 2
# Requests of which `CachedPrefixes` knows that they were taken in.
_TAKEN_KEPT = 256
# After so many seconds without work, what idle slots hold is stored ahead.
_REST_S = 2.0


class DecoderLoop:
    """Runs `step()` on a thread of its own, asleep while there is nothing to do.

    The public methods and properties may be used by any thread. Everything else belongs to the decoder
    thread.

    That thread also opens the backend, and closes it: OpenMP keeps a team of workers for each thread
    that has ever computed, and with a second team, each step's threads wait asleep instead of
    spinning, for a quarter of the speed. So embeddings are computed here, too. `open_backend` runs
    once; what it raises, `__init__` raises.
    """

    def __init__(self, open_backend: Callable[[], Backend], options: EngineOptions) -> None:
        self._options = options
        n_places = options.n_slots + options.max_waiting
        self._command_queue = CommandQueue(
            QueueCapacity(n_places, options.n_slots),
            options.max_wait_s,
            QueueCapacity(BACKGROUND_PLACES * options.n_slots, options.n_slots),
        )
        self._accounts = Accounts()
        self._waiting = FairQueue(self._cost, self._accounts)
        self._sampling_costs = SamplingCosts()
        self._outbox = Outbox()
        self._counts = Counts()
        self._ended: Counter[str] = Counter()
        self._worked = 0.0
        """When the last step ended, or the backend was open."""
        self._disk_tier: DiskTier | None = None
        self._encoding: Encoding | None = None
        self._draining = False
        self.failure: EngineFailedError | None = None
        """Why the loop is dead, if it is."""
        self._request_log = RequestLog()
        self.latencies = Latencies()
        self.delivered: Callable[[], None] = lambda: None
        """Called on the decoder thread when a step's deltas have been handed out."""
        self.progress = Progress()
        self._taken: deque[str] = deque(maxlen=_TAKEN_KEPT)
        self._published: Published
        self._changed = False
        """Whether, since the last view, anything has changed but the number of tokens."""
        opened: Future[Backend] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(open_backend, opened), name="corral-decoder", daemon=True
        )
        self._thread.start()
        backend = opened.result()
        self.vocabulary, self.state_key = backend.vocabulary, backend.state_key
        self.embedding = backend.embedding
        self.adapters = EngineAdapters(backend, self.run_between_steps, self._free_adapter)
        self.projector = backend.projector

    def submit(self, sequences: list[Sequence]) -> list[CorralError | None]:
        """Queue the sequences in one go; for each, None or why it is refused."""
        return self._command_queue.submit(sequences, self._published.view.forecast)

    @property
    def stats(self) -> EngineStats:
        """The engine as of one of its last steps."""
        return self._published.view.stats

    @property
    def cached_prefixes(self) -> CachedPrefixes:
        """The prefixes that prompts could start from, as of one of its last steps."""
        return self._published.view.cached_prefixes

    def explain(self, wanted: str) -> list[RequestRecord]:
        """The records of that request: see `RequestRecord.belongs_to`."""
        states = {slot.request_id: slot.state for slot in self.stats.slots}
        found = {
            record.id: replace(record, state=states.get(record.id, record.state))
            for record in self._command_queue.find(wanted)
        }
        found |= {record.id: record for record in self._request_log.find(wanted)}
        return list(found.values())

    def submit_texts(self, requests: list[Texts]) -> list[CorralError | None]:
        """Queue texts to be embedded; for each request, None or why it is refused."""
        return self._command_queue.submit_texts(requests)

    def run_between_steps(self, command: Command) -> None:
        """Have it done between two steps."""
        self._command_queue.run_between_steps(command)

    def abort(self, request_id: str) -> None:
        """End a request, waiting or running, before the next step: a batch for nobody else is left.
        Idempotent."""
        self._command_queue.abort(request_id)

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests; those not done after `timeout_s` end with an error. Wait for it."""
        self._command_queue.drain(time.monotonic() + timeout_s)
        self._thread.join(timeout_s)
        self._command_queue.cancel()
        self._thread.join()

    # -- decoder thread ---------------------------------------------------------------------------

    def _run(self, open_backend: Callable[[], Backend], opened: Future[Backend]) -> None:
        try:
            backend = self._backend = open_backend()
            self._command_queue.cancel_with(backend.cancel)
            self._set_up(backend)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(backend)
        try:
            while self._carry_out(self._command_queue.take(self._wait_s())):
                if self._has_work:
                    self.step()
                elif self._rested:
                    self._rest()
            if self._disk_tier:
                self._cache.store_all()
        except Exception as error:
            logger.exception("The engine failed; every request it had is ended.")
            self._fail(EngineFailedError(f"The engine failed: {error}"))
        finally:
            if self._encoding:
                self._encoding.close()
            backend.close()
            if self._disk_tier:
                self._disk_tier.close()

    def _rest(self) -> None:
        """Does one piece of the work that waits until there are no requests."""
        if self._cache_change.pays_at_rest() and not self._draining:
            self._change_cache()
        with self._command_queue.resting():
            self._cache.store_ahead()
        self._runner.use_adapters(())
        self._quiet_trials.step()
        self._published.refresh()

    @property
    def _rested(self) -> bool:
        return time.monotonic() >= self._worked + _REST_S

    def _wait_s(self) -> float | None:
        """How long to sleep if nothing arrives; None for ever."""
        if self._has_work:
            return 0.0
        resting = self._cache.behind or self._quiet_trials or self._cache_change.pays_at_rest()
        return max(0.0, self._worked + _REST_S - time.monotonic()) if resting else None

    def _set_up(self, backend: Backend) -> None:
        options = self._options
        self._costs = costs = CostModel(backend.profile)
        self._backlog = Backlog(costs, options.n_slots)
        self._drafter: Drafter | None = None
        if backend.draft is not None and backend.can_rewind:
            self._drafter = Drafter(backend.draft, options.n_slots, self.progress)
        self._scheduler = Scheduler(
            options.n_batch,
            costs,
            options.max_stall_s,
            speculate=options.speculate and backend.can_rewind,
            n_ctx_slot=options.n_ctx_slot,
            mixed=backend.mode.mixes,
            cancellable=backend.can_rewind,
            proposer=self._drafter,
        )
        self._cache, self._disk_tier = open_cache(backend, costs, options)
        self._cache.pin(options.n_batch)
        self._admission = Admission(
            options,
            backend,
            self._cache,
            self._scheduler,
            costs,
            self._waiting,
            self._accounts,
            self._counts,
            self._outbox,
        )
        self._runner = BatchRunner(
            options,
            backend,
            self._cache,
            costs,
            self._admission,
            self._waiting,
            self._command_queue,
            self._outbox,
            self._counts,
            self.latencies,
            self.progress,
            self._scheduler.adapter_turns,
            self._drafter,
        )
        self._cache_change = CacheChange(
            options,
            backend,
            self._cache,
            self._scheduler,
            costs,
            self._waiting,
            self._admission,
        )
        self._quiet_trials = QuietTrials(backend, costs, self._cache.table, options.n_ctx_slot)
        self._embeddings = EmbeddingQueue(
            backend, costs, options.max_stall_s, self.progress, self._accounts
        )
        if backend.projector is not None:
            self._encoding = Encoding(
                backend.projector,
                options.max_stall_s,
                options.picture_ram_bytes,
                self._counts,
                self._interlude,
            )
        self._published = Published(self._view)
        self._worked = time.monotonic()

    def step(self) -> None:
        """Embed; schedule; for each batch, decode, sample and postprocess; deliver; encode a picture."""
        began = time.monotonic()
        self._admit()
        if not self._draining and self._cache_change.pays(self._backlog.n_generated):
            self._change_cache()
            began = time.monotonic()
            self._admit()
        if self._embeddings:
            self._embeddings.step(self._scheduler.running)
            self._carry_out(self._command_queue.take(0))  # who came meanwhile waits no longer
            self._admit()
        beside_s = time.monotonic() - began
        if self._encoding:
            beside_s += self._encoding.piece_s
            self._encoding.resolve(self._scheduler.running)
        table = self._cache.table
        n_cells = table.n_cells
        ends = self._find_slot_ends if self._backend.fills_gaps else None
        batches = self._scheduler.schedule(began, n_cells, ends, beside_s)
        if self._drafter is not None:
            self._charge_drafts(self._drafter)
        self._cache_change.observe(batches, n_cells)
        counts = self._counts
        n_prompt, n_generated = counts.prompt_tokens, counts.generated_tokens
        sample_s = counts.sample_s
        for planned in batches:
            if not self._runner.attempt(planned):
                break
        else:
            self._scheduler.observe(batches, time.monotonic() - began)
        self._cache.copies.stepped()
        self._counts.steps += bool(batches)
        self._flush()
        self._worked = time.monotonic()
        self._counts.step_s += self._worked - began
        if not table.has_idle and self._scheduler.served_all:
            n_prompt = counts.prompt_tokens - n_prompt
            n_generated = counts.generated_tokens - n_generated
            seconds = self._worked - began - (counts.sample_s - sample_s)
            self._backlog.progressed(n_prompt, n_generated, seconds)
        if self._encoding:
            self._encode(self._encoding, self._worked - began, idle=not batches)

    def _charge_drafts(self, drafter: Drafter) -> None:
        for sequence, seconds in drafter.take_spent():
            self._waiting.charge(sequence, seconds)
            self._counts.draft_s += seconds

    def _encode(self, encoding: Encoding, step_s: float, *, idle: bool) -> None:
        failure = encoding.step(lambda: self._scheduler.running, step_s, idle=idle)
        if failure is not None:
            for sequence in failure.sequences:
                self._outbox.end(sequence, FinishReason.ERROR, failure.error)
            self._flush()

    def _interlude(self) -> None:
        """Serve all others, while a picture is encoded."""
        self._carry_out(self._command_queue.take(0))
        self.step()

    def _change_cache(self) -> None:
        self._runner.use_adapters(())  # the new context has none
        self._cache_change.carry_out()
        options = self._options
        self._quiet_trials = QuietTrials(
            self._backend, self._costs, self._cache.table, options.n_ctx_slot
        )
        self._changed = True

    def _free_adapter(self, key: str) -> bool:
        """See EngineAdapters.free."""
        if any(key == one.key for live in self._live for one in live.request.adapters):
            return False
        self._runner.use_adapters(())
        self._backend.free_adapter(key)
        return True

    # -- commands and ends ------------------------------------------------------------------------

    def _carry_out(self, pending: PendingCommands) -> bool:
        """Carry out what other threads asked for; False when a drain is over."""
        self._embeddings.add(pending.texts)
        asked = pending.submitted or pending.commands or pending.aborted or pending.displaced
        if not asked and pending.deadline is None:
            return True
        self._changed = True
        for sequence in pending.submitted:
            sequence.sampling_cost = self._sampling_costs.of(sequence.request.sampling)
        self._admission.queue(pending.submitted)
        for command in pending.commands:  # which may look at what is live
            command.run(self._cache)
        self._taken.extend(sequence.id for sequence in pending.submitted)
        self._counts.failovers += sum(one.request.n_failovers > 0 for one in pending.submitted)
        live = {sequence.id: sequence for sequence in self._live}
        for request_id in pending.aborted:
            if request_id in live:
                self._outbox.end(live[request_id], FinishReason.ABORT)
        for request_id, refusal in pending.displaced.items():
            if request_id in live and live[request_id].trace.admitted is None:
                self._outbox.end(live[request_id], FinishReason.ERROR, refusal)
        self._draining = pending.deadline is not None
        if pending.deadline is not None and time.monotonic() >= pending.deadline:
            error = EngineClosedError("The engine shut down before this request was done.")
            self._embeddings.end(error)
            for sequence in self._live:
                self._outbox.end(sequence, FinishReason.ERROR, error)
        self._flush()
        return self._has_work or not self._draining

    def _find_slot_ends(self) -> dict[int, int]:
        return self._cache.table.slot_ends(self._options.n_ctx_slot)

    def _admit(self) -> None:
        if started := self._admission.admit():
            self._command_queue.started(started)
        for sequence in started:
            if (progress := sequence.progress()) is not None:
                self._outbox.put(sequence, progress)

    def _cost(self, n_prompt: int, n_generated: int) -> float:
        """Seconds of this machine that a request takes, by itself; tokens if nothing was measured."""
        n_slots = self._options.n_slots
        seconds = self._costs.prefill_s(n_prompt, 0)
        seconds += n_generated * self._costs.decode_s(n_slots) / n_slots
        return seconds or n_prompt + n_generated

    def _flush(self) -> None:
        """Free what ended sequences held, and only then tell anybody: whoever reads a request's end
        finds its slot free."""
        for sequence, end in self._outbox.ends:
            self._release(sequence, end)
        changed = self._changed or self._admission.changed or not self._has_work
        self._published.stepped(changed=changed)
        self._changed = self._admission.changed = False
        self._embeddings.deliver()
        outbox = self._outbox.take()
        for sequence, delta in outbox:
            if delta.end is not None:
                self._command_queue.forget(sequence.id)
            sequence.sink(delta)
        if outbox:
            self.delivered()

    def _release(self, sequence: Sequence, end: SequenceEnd) -> None:
        request = sequence.request
        self._changed = True
        self._request_log.add(
            RequestRecord(request.id, request.http_id, request.client, "ended", end)
        )
        self._ended[end.reason] += 1
        self._counts.prefill_s += end.timings.prefill_s
        self._counts.generation_s += end.timings.decode_s
        self._counts.n_tokens_max = max(self._counts.n_tokens_max, sequence.n_past)
        self._waiting.end(sequence)
        sequence.close()
        if sequence.trace.admitted is not None:
            self._backlog.ended(sequence)
        self._admission.release(sequence)

    def _fail(self, failure: EngineFailedError) -> None:
        """The backend is broken: end everything, and refuse what comes."""
        self.failure = failure
        never_taken = self._command_queue.fail()
        self._waiting.extend(never_taken.submitted)
        self._embeddings.add(never_taken.texts)
        self._embeddings.end(failure)
        for command in never_taken.commands:
            command.refuse(failure)
        for sequence in self._live:
            self._outbox.end(sequence, FinishReason.ERROR, failure)
        self._flush()

    @property
    def _live(self) -> list[Sequence]:
        return [*self._scheduler.running, *self._waiting]

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._scheduler.running or self._embeddings)

    def _view(self) -> View:
        forecast = self._backlog.forecast(self._live)
        stats = engine_stats(
            self._options,
            self._backend,
            self._cache,
            self._costs,
            forecast,
            self._counts,
            ended=self._ended,
            embedded=self._embeddings.counts,
            running=self._scheduler.running,
            waiting=self._waiting.unordered,
            draining=self._draining,
        )
        return View(stats, self._hold(), forecast)

    def _hold(self) -> CachedPrefixes:
        requests = (sequence.request for sequence in self._waiting.unordered)
        waiting = (CachedPrompt(one.content_group, one.given) for one in requests)
        used = frozenset(adapters_of(one.request.content_group) for one in self._live)
        return CachedPrefixes((*waiting, *self._cache.prompts), tuple(self._taken), used)
