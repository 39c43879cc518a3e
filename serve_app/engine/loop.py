"""The decoder thread: the only one that touches the backend."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from serve_app.engine.backend import Backend
from serve_app.engine.cost_model import CostModel, Measurements
from serve_app.engine.fair_queue import FairQueue
from serve_app.engine.mailbox import Commands, Mailbox
from serve_app.engine.options import EngineOptions
from serve_app.engine.prefix_store import PrefixStore, StoredPrefix
from serve_app.engine.scheduler import Pass, Scheduler, plan_pass
from serve_app.engine.sequence import NO_SLOT, Sequence
from serve_app.engine.slots import Choice, Slot, SlotTable
from serve_app.engine.stats import EngineStats, SlotStats
from serve_app.errors import CorralError, DecodeError, EngineClosedError, EngineFailedError
from serve_app.types import FinishReason, TokenDelta

logger = logging.getLogger("corral.engine")

# Tokens below which a prefix is not worth copying, however short the lane.
_LEAST_COPY = 16
# Steps in a row in which nothing could be decoded, after which the backend counts as broken.
_MAX_FAILED_STEPS = 3
# Weight of the newest request in the running mean of service times.
_SERVICE_TIME_WEIGHT = 0.1


class DecoderLoop:
    """Runs `step()` on a thread of its own, asleep while there is nothing to do.

    The public methods may be called by any thread; `stats` is an immutable snapshot, replaced after
    every change. Everything else belongs to the decoder thread.

    That thread also opens the backend, and closes it: OpenMP keeps a team of workers for each thread
    that has ever computed, and with a second team, each step's threads wait asleep instead of
    spinning, for a quarter of the speed. `open_backend` runs once; what it raises, `__init__` raises.
    """

    def __init__(self, open_backend: Callable[[], Backend], options: EngineOptions) -> None:
        self._options = options
        self._mailbox = Mailbox(options.n_slots + options.max_waiting)
        min_copy = max(_LEAST_COPY, options.n_ctx_slot // 64)
        self._slots = SlotTable(options.n_slots, min_copy, options.pinned)
        self._stored = PrefixStore(options.cache_ram_bytes)
        self._waiting = FairQueue(self._cost)
        self._copying: set[int] = set()
        """Lanes of copies that the backend makes with the next decode."""
        self._outbox: list[tuple[Sequence, TokenDelta]] = []
        self._counts: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._service_s: float | None = None
        self._failed_steps = 0
        self._draining = False
        self.failure: EngineFailedError | None = None
        """Why the loop is dead, if it is."""
        self.stats: EngineStats
        opened: Future[Backend] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(open_backend, opened), name="corral-decoder", daemon=True
        )
        self._thread.start()
        self.vocabulary = opened.result().vocabulary

    def submit(self, sequences: list[Sequence]) -> list[CorralError | None]:
        """Queue the sequences in one go; for each, None or why it is refused."""
        # A place frees each time one of the n_slots running requests ends.
        retry_after_s = max(1, math.ceil((self._service_s or 0) / self._options.n_slots))
        return self._mailbox.submit(sequences, retry_after_s)

    def abort(self, request_id: str) -> None:
        """End a request, waiting or running, before the next step. Idempotent."""
        self._mailbox.abort(request_id)

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests; those not done after `timeout_s` end with an error. Wait for it."""
        self._mailbox.drain(time.monotonic() + timeout_s)
        self._thread.join()

    # -- decoder thread ---------------------------------------------------------------------------

    def _run(self, open_backend: Callable[[], Backend], opened: Future[Backend]) -> None:
        try:
            backend = self._backend = open_backend()
            bounded = self._options.max_stall_s is not None
            self._costs = CostModel(backend.measure() if bounded else Measurements())
            self._pin(backend)
        except BaseException as error:
            opened.set_exception(error)
            return
        self._scheduler = Scheduler(self._options.n_batch, self._costs, self._options.max_stall_s)
        self.stats = self._snapshot()
        opened.set_result(backend)
        try:
            while self._obey(self._mailbox.take(wait=not self._has_work)):
                self.step()
        except Exception as error:
            logger.exception("The engine failed; every request it had is ended.")
            self._fail(EngineFailedError(f"The engine failed: {error}"))
        finally:
            backend.close()

    def _pin(self, backend: Backend) -> None:
        """Compute what is pinned."""
        n_batch = self._options.n_batch
        for lane, tokens in enumerate(self._options.pinned, start=self._options.n_slots):
            rows = [(token, position, lane, False) for position, token in enumerate(tokens)]
            for start in range(0, len(rows), n_batch):
                backend.decode(rows[start : start + n_batch])

    def step(self) -> None:
        """Schedule; for each pass, decode, sample and postprocess; deliver."""
        self._admit()
        passes = self._scheduler.schedule()
        for planned in passes:
            try:
                self._forward(planned)
            except DecodeError:
                self._retry_one_by_one(planned)
        self._counts["steps"] += bool(passes)
        self._flush()

    def _forward(self, plan: Pass) -> None:
        began = time.monotonic()
        self._backend.decode(plan.rows)
        self._copying.clear()
        self._learn(plan, time.monotonic() - began)
        sampled = [
            None if chunk.sample_row is None else chunk.sequence.sample(chunk.sample_row)
            for chunk in plan.chunks
        ]
        self._failed_steps = 0
        for chunk, token in zip(plan.chunks, sampled, strict=True):
            sequence = chunk.sequence
            self._counts["prompt_tokens"] += sequence.advance(chunk.n_rows)
            if token is not None:
                self._counts["generated_tokens"] += 1
                delta = sequence.accept(token, self._backend.vocabulary, self._options.n_ctx_slot)
                self._outbox.append((sequence, delta))

    def _learn(self, plan: Pass, seconds: float) -> None:
        first = plan.chunks[0]
        if len(plan.rows) == len(plan.chunks):
            self._costs.saw_decode(len(plan.rows), seconds)
        elif len(plan.chunks) == 1:
            self._costs.saw_prefill(first.n_rows, first.sequence.n_past, seconds)

    def _retry_one_by_one(self, plan: Pass) -> None:
        """The batch failed: decode each sequence alone, so that only the one at fault ends.

        Raises EngineFailedError when it is never one sequence's fault."""
        failed_before, self._failed_steps = self._failed_steps, self._failed_steps + 1
        if failed_before == _MAX_FAILED_STEPS:
            raise EngineFailedError(f"Nothing could be decoded in {failed_before} steps.")
        for chunk in plan.chunks:
            try:
                self._backend.truncate(chunk.sequence.slot_id, chunk.sequence.n_past)
                self._forward(plan_pass([(chunk.sequence, chunk.n_rows)]))
            except DecodeError as error:
                logger.error("Request %s cannot be decoded: %s", chunk.sequence.id, error)
                self._end(chunk.sequence, FinishReason.ERROR, error)

    def _obey(self, commands: Commands) -> bool:
        """Carry out what other threads asked for; False when a drain is over."""
        if not (commands.submitted or commands.aborted) and commands.deadline is None:
            return True
        self._waiting.extend(commands.submitted)
        live = {sequence.id: sequence for sequence in self._live}
        for request_id in commands.aborted:
            if request_id in live:
                self._end(live[request_id], FinishReason.ABORT)
        self._draining = commands.deadline is not None
        if commands.deadline is not None and time.monotonic() >= commands.deadline:
            for sequence in self._live:
                error = EngineClosedError("The engine shut down before this request was done.")
                self._end(sequence, FinishReason.ERROR, error)
        self._flush()
        return self._has_work or not self._draining

    def _admit(self) -> None:
        """Move waiting sequences into idle slots, in the order that is fair to their clients; one
        that waits for a prefix lets others pass."""
        for sequence in self._waiting:
            if not self._slots.has_idle:
                return
            n_stored, stored = self._stored.longest(sequence.tokens)
            choice = self._slots.choose(sequence.tokens, n_stored)
            if choice is None:
                continue
            slot = choice.slot
            if choice.stored and stored is not None:
                self._stored.used(stored)
            self._store(slot, self._slots.loses(choice))
            n_cached = self._fill(choice, stored)
            sampler = self._backend.sampler(sequence.request.sampling, sequence.request.prompt)
            # Until here it waits: a backend that breaks above ends it with all the others.
            self._waiting.admit(sequence)
            sequence.admit(slot.id, n_cached, sampler)
            self._slots.occupy(slot, sequence)
            self._scheduler.add(sequence)
            self._counts["cached_tokens"] += n_cached

    def _cost(self, n_prompt: int, n_generated: int) -> float:
        """Seconds of this machine that a request takes, by itself; tokens if nothing was measured."""
        n_slots = self._options.n_slots
        seconds = self._costs.prefill_s(n_prompt, 0)
        seconds += n_generated * self._costs.decode_s(n_slots) / n_slots
        return seconds or n_prompt + n_generated

    def _store(self, slot: Slot, tokens: list[int]) -> None:
        """Save an idle slot's tokens, unless there are none or somebody has them, or they are not
        really there yet."""
        n_bytes = len(tokens) * self._backend.memory.cache_bytes_per_token
        settled = slot.id not in self._copying
        if tokens and settled and self._stored.wants(tokens, n_bytes):
            self._stored.put(tokens, self._backend.save(slot.id))

    def _fill(self, choice: Choice, stored: StoredPrefix | None) -> int:
        """Have the chosen prefix in the chosen slot, and nothing else; returns its tokens."""
        slot = choice.slot
        if choice.stored and stored is not None:
            if slot.id in self._copying:  # written to now, the copy would be of the new content
                return self._keep(slot, 0)
            try:
                self._backend.restore(slot.id, stored.state)
            except DecodeError as error:
                logger.error("A stored prefix is lost: %s", error)
                return self._keep(slot, 0)
            self._counts["restored_tokens"] += choice.n_cached
        elif choice.copy_from is not None:
            self._backend.copy(choice.copy_from.id, slot.id)
            self._copying |= {choice.copy_from.id, slot.id}
        return self._keep(slot, choice.n_cached)

    def _keep(self, slot: Slot, n_cached: int) -> int:
        """Drop all but the slot's first `n_cached` tokens, or all of them if the model's memory
        cannot be cut there (recurrent layers keep no past states); returns how many it kept."""
        try:
            self._backend.truncate(slot.id, n_cached)
        except DecodeError:
            self._backend.truncate(slot.id, 0)
            return 0
        return n_cached

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: CorralError | None = None
    ) -> None:
        """End a sequence that did not end itself; nothing happens if it has."""
        if not sequence.finished:
            self._outbox.append((sequence, sequence.finish(reason, error=error)))

    def _flush(self) -> None:
        """Free what ended sequences held, and only then tell anybody: whoever reads a request's end
        finds its slot free."""
        for sequence, delta in self._outbox:
            if delta.end is not None:
                self._release(sequence, delta.end.reason)
        self.stats = self._snapshot()
        outbox, self._outbox = self._outbox, []
        for sequence, delta in outbox:
            if delta.end is not None:
                self._mailbox.forget(sequence.id)
            sequence.sink(delta)

    def _release(self, sequence: Sequence, reason: FinishReason) -> None:
        self._ended[reason] += 1
        self._waiting.end(sequence)
        if sequence.slot_id == NO_SLOT:
            return
        mean = sequence.service_s if self._service_s is None else self._service_s
        self._service_s = mean + _SERVICE_TIME_WEIGHT * (sequence.service_s - mean)
        self._scheduler.remove(sequence)
        self._slots.release(self._slots.slots[sequence.slot_id])
        sequence.close()

    def _fail(self, failure: EngineFailedError) -> None:
        """The backend is broken: end everything, and refuse what comes."""
        self.failure = failure
        self._waiting.extend(self._mailbox.fail())
        for sequence in self._live:
            self._end(sequence, FinishReason.ERROR, failure)
        self._flush()

    @property
    def _live(self) -> list[Sequence]:
        return [*self._scheduler.running, *self._waiting]

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._scheduler.running)

    def _snapshot(self) -> EngineStats:
        return EngineStats(
            n_slots=self._options.n_slots,
            n_ctx_slot=self._options.n_ctx_slot,
            threads=self._options.threads,
            running=len(self._scheduler.running),
            waiting=len(self._waiting),
            draining=self._draining,
            steps=self._counts["steps"],
            prompt_tokens=self._counts["prompt_tokens"],
            cached_tokens=self._counts["cached_tokens"],
            generated_tokens=self._counts["generated_tokens"],
            ended=dict(self._ended),
            restored_tokens=self._counts["restored_tokens"],
            stored_prefixes=len(self._stored),
            stored_bytes=self._stored.n_bytes,
            weights_bytes=self._backend.memory.weights_bytes,
            cache_bytes=len(self._slots.slots) * self._backend.memory.cache_bytes_per_slot,
            cache_bytes_per_slot=self._backend.memory.cache_bytes_per_slot,
            step_time=self._costs.curve(),
            slots=tuple(_slot_stats(slot) for slot in self._slots.slots),
        )


def _slot_stats(slot: Slot) -> SlotStats:
    sequence = slot.sequence
    if sequence is None:
        state = "pinned" if slot.pinned else "idle"
        return SlotStats(slot.id, state, None, slot.n_past, 0, 0)
    return SlotStats(
        slot.id,
        sequence.state.value,
        sequence.id,
        sequence.n_past,
        sequence.n_prompt,
        sequence.n_generated,
    )
