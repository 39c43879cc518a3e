"""The engine's core: the state of all sequences, and the step that gets them on."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from operator import sub
from typing import TypeVar

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import (
    CacheFullError,
    CorralError,
    DecodeCancelledError,
    EngineClosedError,
    EngineFailedError,
)
from serve_app.base.sharing import turns
from serve_app.base.values.adapters import adapters_of
from serve_app.base.values.answers import FinishReason, SequenceEnd
from serve_app.base.values.replicas import RequestRecord
from serve_app.engine.backends.base import Backend
from serve_app.engine.cache.manager import open_cache
from serve_app.engine.core.admission import Admission
from serve_app.engine.core.batch_runner import BatchResult, BatchRunner
from serve_app.engine.core.command_queue import CommandQueue, PendingCommands
from serve_app.engine.core.guest import Guest, Steps
from serve_app.engine.core.postprocessor import Outbox, Postprocessor
from serve_app.engine.core.scheduler.batch import Batch, SequenceRows, plan_batch
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.cost_model import CostModel
from serve_app.engine.health import Progress
from serve_app.engine.metrics.snapshot import Published, View, engine_stats
from serve_app.engine.metrics.stats import CachedPrefixes, CachedPrompt, Counts
from serve_app.engine.metrics.trace import Latencies, RequestLog
from serve_app.engine.policy.forecast import Backlog

logger = logging.getLogger("corral.engine")

G = TypeVar("G", bound=Guest)
MakeGuests = Callable[["EngineCore"], list[Guest]]
"""Makes the guests of a core, in the order in which they are called. Decoder thread."""

_Done = tuple[int, int]
"""Tokens of prompts and of answers up to some moment."""
# Steps in a row in which nothing could be decoded, after which the backend counts as broken.
_MAX_FAILED_STEPS = 3
# Seconds of steps after which what was learned is worth more than what was measured.
_KEPT_FROM_S = 20.0
# Requests of which `CachedPrefixes` knows that they were taken in.
_TAKEN_KEPT = 256


class EngineCore:
    """All sequences of one backend, and the parts that get them on. Decoder thread only, but for what
    `Published`, `RequestLog`, `Latencies` and `Progress` say of themselves.

    A request waits in `queue` and gets a slot by `admission`. Its rows are planned by `scheduler` and
    computed by `runner`. Its tokens leave through the outbox. Guests do their work between these.
    """

    def __init__(
        self,
        backend: Backend,
        options: EngineOptions,
        command_queue: CommandQueue,
        progress: Progress,
        make_guests: MakeGuests,
    ) -> None:
        self.backend = backend
        self.options = options
        self.turns = turns.current()
        self.command_queue = command_queue
        self.progress = progress
        self.costs = costs = CostModel(backend.cache_plan.profile)
        self.budget = StepBudget(options.max_stall_ms)
        self.policy = command_queue.policy
        self.counts = Counts()
        self.latencies = Latencies()
        self.request_log = RequestLog()
        self.backlog = Backlog(costs, options.n_slots)
        self.scheduler = Scheduler(
            options.n_batch,
            costs,
            self.budget,
            mixed=backend.cache_plan.mode.mixes,
            n_rewind=backend.traits.n_rewind,
        )
        self.cache = open_cache(backend, costs, options, self.budget)
        self.cache.pin(options.n_batch)
        self._outbox = outbox = Outbox()
        self.admission = Admission(
            backend, self.cache, self.scheduler, command_queue, self.budget, self.counts, outbox
        )
        self.runner = BatchRunner(backend, costs, progress, command_queue)
        self._runs_ahead = backend.draft is None and backend.traits.n_rewind >= options.n_batch
        """Whether tokens can be computed before anybody has looked at the tokens before them."""
        self._postprocessor = Postprocessor(
            options,
            backend.vocabulary,
            self.cache,
            outbox,
            self.counts,
            self.latencies,
            self.scheduler,
        )
        self._taken: deque[str] = deque(maxlen=_TAKEN_KEPT)
        self._failed_steps = 0
        self._waited_s = 0.0
        """Seconds for which the step waited for its turn."""
        self.delivered: Callable[[], None] = lambda: None
        self.steps = Steps(
            running=self.scheduler.running,
            waiting=self.admission.waiting,
            budget=self.budget,
            counts=self.counts,
            charge=self.policy.charge,
            admit=self.admit,
            take_commands=self.take_commands,
            interlude=self.interlude,
            end=self.end,
            interrupt=self._interrupt,
            resting=command_queue.computing,
        )
        self._compare_promises()
        self.guests = make_guests(self)
        self.published = Published(self._view)

    def _compare_promises(self) -> None:
        """Say so if the engines that share these cores cannot all keep to `max_stall_ms`."""
        pass_s = self.costs.batch_s(self.options.n_slots, 0)
        all_s = self.turns.expect(pass_s)
        if all_s > max(pass_s, self.budget.max_stall_s):
            logger.warning(
                "Streams may wait %.0f ms, longer than max_stall_ms: a pass of each model on these "
                "cores takes so long together, with all slots busy.",
                1000 * all_s,
            )

    # -- the step ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit, schedule, decode, sample, postprocess and deliver: one turn of the loop."""
        began, done = self._begin()
        self.admit()
        for guest in self.guests:
            guest.before_schedule()
        batches, results = self._schedule(), list[BatchResult]()
        for batch in batches:
            results.append(self.runner.run(batch, ahead=self._runs_ahead and len(batches) == 1))
            if not self._postprocess(results[-1]):
                break
        computed_s = self.budget.elapsed_s
        self.deliver()
        step_s = self._account(began, done)
        self._learn(results, computed_s)
        for guest in self.guests:
            guest.after_step(step_s, idle=not batches)

    def step_in_turn(self) -> bool:
        """Compute a step in this engine's turn on its cores. Returns whether it has the turn, for which
        work behind that of others may wait."""
        waited_s = self.turns.waited_s
        turn_s = self.turns.take(behind=self._is_behind)
        self._waited_s = self.turns.waited_s - waited_s
        self.counts.turn_s, self.counts.turn_wait_s = self.turns.held_s, self.turns.waited_s
        if turn_s is not None:
            self.budget.begin_turn(turn_s)
            if self._waited_s:
                self.take_commands()  # this step can have them, too
            self.step()
        return turn_s is not None

    @property
    def _is_behind(self) -> bool:
        """Whether all work is in the background."""
        return all(sequence.is_behind for sequence in self.live) and not any(
            guest.has_urgent_work for guest in self.guests
        )

    def _begin(self) -> tuple[float, _Done]:
        if not self.scheduler.running:  # nobody has waited since the last step
            self.budget.begin()
        return time.monotonic() - self._waited_s, self._done

    def admit(self) -> None:
        """Move waiting sequences into idle slots."""
        for sequence in self.admission.admit():
            if (progress := sequence.progress()) is not None:
                self._outbox.put(sequence, progress)

    def _schedule(self) -> list[Batch]:
        ends = self.cache.table.slot_ends if self.backend.traits.fills_gaps else None
        n_cells = self.cache.table.n_cells if self.backend.cache_plan.mode.mixes else 0
        batches = self.scheduler.schedule(time.monotonic(), n_cells, ends)
        for guest in self.guests:
            guest.before_decode(batches)
        self.counts.steps += bool(batches)
        return batches

    def _postprocess(self, result: BatchResult) -> bool:
        """Apply the result of a batch; False if the rest of the step is to be planned anew."""
        match result.error:
            case None:
                self._failed_steps = 0
                self._postprocessor.apply(result)
                return True
            case CacheFullError():
                return self._make_room(result.batch, result.error)
            case DecodeCancelledError():  # the next step ends its sequences, or serves who came first
                for chunk in result.batch.chunks:
                    self.cache.drop_rows(chunk.sequence)
                return False
            case _:
                return self._retry_one_by_one(result.batch)

    def _make_room(self, batch: Batch, error: CacheFullError) -> bool:
        if not self.admission.make_room():
            self._outbox.end(batch.chunks[0].sequence, FinishReason.ERROR, error)
        return False

    def _retry_one_by_one(self, batch: Batch) -> bool:
        """Decode each sequence of a batch that failed alone, so that only the one at fault ends. Raises
        EngineFailedError if it is never one sequence's fault that nothing can be decoded."""
        failed_before, self._failed_steps = self._failed_steps, self._failed_steps + 1
        if failed_before == _MAX_FAILED_STEPS:
            raise EngineFailedError(f"Nothing could be decoded in {failed_before} steps.")
        for chunk in batch.chunks:
            if not self.cache.drop_rows(chunk.sequence):
                continue
            result = self.runner.run(plan_batch([SequenceRows(chunk.sequence, chunk.n_rows)]))
            if result.error is None or isinstance(
                result.error, CacheFullError | DecodeCancelledError
            ):
                if not self._postprocess(result):
                    return False
            else:
                logger.error("Request %s cannot be decoded: %s", chunk.sequence.id, result.error)
                self._postprocessor.end(chunk, result.error)
        return True

    def _learn(self, results: list[BatchResult], computed_s: float) -> None:
        """Learn from a step when its tokens are on their way: others work on these meanwhile."""
        for result in results:
            self.runner.learn(result)
        if results and results[-1].error is None:
            self.scheduler.observe([result.batch for result in results], computed_s)

    @property
    def _done(self) -> _Done:
        return self.counts.prompt_tokens, self.counts.generated_tokens

    def _account(self, began: float, done: _Done) -> float:
        """Restart the budget, and learn how fast work gets done. Returns the seconds of the step."""
        self.budget.begin()
        self.steps.worked_at = time.monotonic()
        seconds = self.steps.worked_at - began
        self.counts.step_s += seconds
        if not self.cache.table.n_idle and self.scheduler.served_all:
            n_prompt, n_generated = map(sub, self._done, done)
            self.backlog.learn_pace(n_prompt, n_generated, seconds)
        return seconds

    def deliver(self) -> None:
        """Free what ended sequences held, and only then tell anybody: whoever reads a request's end finds
        its slot free."""
        for sequence, end in self._outbox.ends:
            self._release(sequence, end)
        self.published.on_step(changed=self.admission.changed or not self.has_work)
        self.admission.changed = False
        for guest in self.guests:
            guest.deliver()
        outbox = self._outbox.take()
        for sequence, delta in outbox:
            if delta.end is not None:
                self.command_queue.forget(sequence.id)
            sequence.sink(delta)
        if outbox:
            self.delivered()

    def _release(self, sequence: Sequence, end: SequenceEnd) -> None:
        request = sequence.request
        self.request_log.add(
            RequestRecord(request.id, request.http_id, request.client, "ended", end)
        )
        self.counts.ended[end.reason] += 1
        self.counts.prefill_s += end.timings.prefill_s
        self.counts.generation_s += end.timings.decode_s
        self.counts.n_tokens_max = max(self.counts.n_tokens_max, sequence.n_past)
        sequence.close()
        if sequence.trace.admitted is not None:
            self.backlog.learn_end(sequence, end)
        self.admission.release(sequence)
        for guest in self.guests:
            guest.forget(sequence)

    # -- between steps ----------------------------------------------------------------------------

    def interlude(self) -> None:
        """Serve all others in the middle of a guest's work: take in what has come, and compute a step. The
        guest goes on in this engine's turn."""
        self.take_commands()
        while self.has_work and not self.step_in_turn():
            self.take_commands()

    def _interrupt(self) -> None:
        self.runner.use_adapters(())  # another context has none
        self.admission.interrupt()

    def take_commands(self, wait_s: float | None = 0.0) -> bool:
        """Carry out what other threads have sent, or send within `wait_s`; False when a drain is over."""
        return self._carry_out(self.command_queue.take(wait_s))

    def _carry_out(self, pending: PendingCommands) -> bool:
        if not pending:
            return True
        self.admission.changed = True
        for sequence in pending.submitted:
            sequence.expected_s = self.backlog.cost_s(sequence)
        self.admission.enqueue(pending.submitted)
        for command in pending.commands:  # which may look at what is live
            command.run(self.cache)
        self._taken.extend(sequence.id for sequence in pending.submitted)
        self.counts.failovers += sum(seq.request.n_failovers > 0 for seq in pending.submitted)
        live = {sequence.id: sequence for sequence in self.live}
        for request_id in pending.aborted:
            if request_id in live:
                self._outbox.end(live[request_id], FinishReason.ABORT)
        for request_id, refusal in pending.displaced.items():
            if request_id in live:
                self._outbox.end(live[request_id], FinishReason.ERROR, refusal)
        self.steps.is_draining = pending.deadline is not None
        if pending.deadline is not None and time.monotonic() >= pending.deadline:
            self._end_all(EngineClosedError("The engine shut down before this request was done."))
        self.deliver()
        return self.has_work or not self.steps.is_draining

    def rest(self) -> None:
        """Do one piece of the work that waits until there are no requests. It has no turn: what is stored
        takes a disk's time. What computes takes one."""
        self.runner.use_adapters(())
        for guest in self.guests:
            if guest.rest_at <= time.monotonic():
                guest.at_rest()
        self.published.refresh()

    @property
    def rest_at(self) -> float:
        """The time from which on `rest` has something to do; infinite if there is nothing."""
        return min(guest.rest_at for guest in self.guests)

    def end(self, sequences: Iterable[Sequence], error: CorralError) -> None:
        """End sequences that cannot go on, and tell them."""
        for sequence in sequences:
            self._outbox.end(sequence, FinishReason.ERROR, error)
        self.deliver()

    def fail(self, failure: EngineFailedError) -> None:
        """End everything, and refuse what comes: the backend is broken."""
        never_taken = self.command_queue.fail()
        self.admission.enqueue(never_taken.submitted)
        for command in never_taken.commands:
            command.refuse(failure)
        self._end_all(failure)
        self.deliver()

    def _end_all(self, error: CorralError) -> None:
        for guest in self.guests:
            guest.fail(error)
        for sequence in self.live:
            self._outbox.end(sequence, FinishReason.ERROR, error)

    def close(self, *, healthy: bool) -> None:
        """Close the guests, and then the backend. What was learned of its costs is kept."""
        self.turns.give()
        with ExitStack() as stack:
            stack.callback(self.backend.close)
            if healthy and self.counts.step_s >= _KEPT_FROM_S:
                self.backend.keep(self.costs.learned_profile())
            for guest in self.guests:
                stack.callback(guest.close, healthy=healthy)

    # -- state ------------------------------------------------------------------------------------

    def guest(self, kind: type[G]) -> G:
        """Any thread: the guest of that class."""
        return next(guest for guest in self.guests if isinstance(guest, kind))

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that have a slot, in the order in which they got it."""
        return tuple(self.scheduler.running)

    @property
    def live(self) -> list[Sequence]:
        """The sequences that run or wait."""
        return [*self.running, *self.admission.waiting]

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        if self.admission.waiting or self.running:
            return True
        return any(guest.has_work for guest in self.guests)

    def _view(self) -> View:
        forecast = self.backlog.forecast(self.live, self.scheduler.crowding)
        return View(engine_stats(self, forecast), self._cached_prefixes(), forecast)

    def _cached_prefixes(self) -> CachedPrefixes:
        requests = (sequence.request for sequence in self.admission.waiting)
        waiting = (CachedPrompt(request.content_group, request.all_tokens) for request in requests)
        adapters = frozenset(adapters_of(seq.request.content_group) for seq in self.live)
        return CachedPrefixes((*waiting, *self.cache.prompts), tuple(self._taken), adapters)
