"""The queue from other threads to the decoder thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serve_app.base.errors import (
    CorralError,
    EngineClosedError,
    EngineFailedError,
    InvalidRequestError,
    QueueFullError,
)
from serve_app.base.values.answers import Accepted
from serve_app.base.values.replicas import RequestRecord
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.policy.forecast import Forecast
from serve_app.engine.policy.policy import SlotPolicy

if TYPE_CHECKING:
    from serve_app.engine.cache.manager import KVCacheManager


class Command:
    """Work on the KV cache, or on a guest, between two steps. `future` has the result."""

    def __init__(self, run: Callable[[KVCacheManager], Any], *, is_urgent: bool = False) -> None:
        """An urgent command does not wait for a batch in the background: that batch is cancelled."""
        self._run = run
        self.is_urgent = is_urgent
        self.future: Future[Any] = Future()

    def run(self, cache: KVCacheManager) -> None:
        """Decoder thread: do the work, once. `future` raises its exception."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._run(cache))
        except Exception as error:
            self.future.set_exception(error)

    def refuse(self, error: CorralError) -> None:
        """End the command without doing the work; once."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


RunCommand = Callable[[Callable[["KVCacheManager"], Any]], Any]
"""Has work on the KV cache done between two steps, waits for it, and returns its result."""


@dataclass(slots=True)
class PendingCommands:
    """The commands of other threads since the last step."""

    deadline: float | None = None
    """The end of a drain, on `time.monotonic`; None while the engine is open."""
    submitted: list[Sequence] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    displaced: dict[str, QueueFullError] = field(default_factory=dict)
    """The requests that still wait and whose place another client's request got, with their errors."""

    def __bool__(self) -> bool:
        return bool(self.submitted or self.commands or self.aborted or self.deadline is not None)


_NOTHING = PendingCommands()
# The longest wait for the next request of a burst: as part of the time to the last one's first token.
_BURST_PART, _MOST_BURST_S = 0.1, 0.02


class CommandQueue:
    """The place where other threads leave commands. It knows the live request ids, and asks the policy whom
    it accepts. So a duplicate, or one too many, is refused at once, on the caller's thread."""

    def __init__(self, policy: SlotPolicy) -> None:
        self.policy = policy
        self._changed = threading.Condition()
        self._live: dict[str, GenerationRequest] = {}
        self._pending = PendingCommands()
        self._failed = False
        self._cancel: Callable[[bool], None] = lambda cancelled: None
        self._computed: frozenset[str] = frozenset()
        """Requests of the batch that is being computed."""
        self._is_preemptible = False
        """Whether that batch is cancelled for whoever comes."""
        self._cancels_all = self._is_cancelled = False

    def submit(self, sequences: list[Sequence], forecast: Forecast) -> list[CorralError | Accepted]:
        """Any thread: accept sequences or say, for each, why not; `forecast` is of those before."""
        with self._changed:
            outcomes = [self._accept(sequence, forecast) for sequence in sequences]
            self._update_cancel()
            self._changed.notify()
        return outcomes

    def run_between_steps(self, command: Command) -> None:
        """Any thread: have the command run between two steps, or refused."""
        with self._changed:
            refusal = self._refusal()
            if refusal is None:
                self._pending.commands.append(command)
                self._update_cancel()
                self._changed.notify()
        if refusal is not None:
            command.refuse(refusal)

    def _refusal(self) -> CorralError | None:
        if self._failed:
            return EngineFailedError("The engine has failed and is being restarted.")
        if self._pending.deadline is not None:
            return EngineClosedError("The engine is shutting down.")
        return None

    def _accept(self, sequence: Sequence, forecast: Forecast) -> CorralError | Accepted:
        if refusal := self._refusal():
            return refusal
        if sequence.id in self._live:
            return InvalidRequestError(
                f"A request with the id {sequence.id!r} is already running.", "id"
            )
        displaced = self.policy.accepts(sequence, forecast, self._pending.submitted)
        if isinstance(displaced, CorralError):
            return displaced
        self._pending.displaced |= displaced
        self._live[sequence.id] = sequence.request
        self._pending.submitted.append(sequence)
        return forecast.acceptance(sequence)

    def find(self, name: str) -> list[RequestRecord]:
        """Any thread: the records of that request's sequences that were accepted and have not ended."""
        with self._changed:
            records = (
                RequestRecord(request.id, request.http_id, request.client, "waiting")
                for request in self._live.values()
            )
            return [record for record in records if record.belongs_to(name)]

    def abort(self, request_id: str) -> None:
        """Any thread: end that request if it is live."""
        with self._changed:
            if request_id in self._live:
                self._pending.aborted.add(request_id)
                self._update_cancel()
                self._changed.notify()

    def cancel_with(self, cancel: Callable[[bool], None]) -> None:
        """Decoder thread: how to cancel the batch that is being computed: `Backend.cancel`."""
        with self._changed:
            self._cancel = cancel
            cancel(self._is_cancelled)

    @contextmanager
    def computing(self, sequences: SequenceOf[Sequence] = ()) -> Iterator[None]:
        """Decoder thread: a batch for these sequences. It is cancelled once all of them are aborted. If all
        are behind all others, or there are none, it is also cancelled once a request comes."""
        with self._changed:
            self._computed = frozenset(sequence.id for sequence in sequences)
            self._is_preemptible = all(sequence.is_behind for sequence in sequences)
            self._update_cancel()
        try:
            yield
        finally:
            with self._changed:
                self._computed, self._is_preemptible = frozenset(), False
                self._update_cancel()

    def _update_cancel(self) -> None:
        """Cancel the batch, or allow batches again, if that has changed. With the lock."""
        aborted = bool(self._computed) and self._computed <= self._pending.aborted
        unwanted = self._cancels_all or aborted
        unwanted = unwanted or (self._is_preemptible and self._somebody_has_come())
        if unwanted != self._is_cancelled:
            self._is_cancelled = unwanted
            self._cancel(unwanted)

    def _somebody_has_come(self) -> bool:
        pending = self._pending
        return any(not sequence.request.background for sequence in pending.submitted) or any(
            command.is_urgent for command in pending.commands
        )

    def cancel(self) -> None:
        """Any thread: cancel the batch that is being computed, and all that come."""
        with self._changed:
            self._cancels_all = True
            self._update_cancel()

    def drain(self, deadline: float) -> None:
        """Any thread: take no new work; the rest must be over by the deadline."""
        with self._changed:
            self._pending.deadline = min(deadline, self._pending.deadline or math.inf)
            self._changed.notify()

    @property
    def has_come(self) -> bool:
        """Decoder thread: whether `take` has something."""
        return bool(self._pending)

    def take(self, wait_s: float | None) -> PendingCommands:
        """Decoder thread: take what has come; sleep until something has, `wait_s` at most (None: ever).
        A burst that ends a sleep is taken as a whole."""
        if wait_s == 0.0 and not self.has_come:  # what comes now comes with the next step
            return _NOTHING
        with self._changed:
            if wait_s != 0.0 and self._changed.wait_for(lambda: self._pending, wait_s):
                self._await_burst()
            pending, self._pending = self._pending, PendingCommands(self._pending.deadline)
            return pending

    def _await_burst(self) -> None:
        """Wait for the requests that an ingress is about to send."""
        while self._pending.submitted and self._pending.submitted[-1].request.n_preparing:
            if not self._another_comes():
                break

    def _another_comes(self) -> bool:
        submitted, n_before = self._pending.submitted, len(self._pending.submitted)
        newest = submitted[-1].expected
        wait_s = min(_MOST_BURST_S, _BURST_PART * (newest.alone_s if newest else 0.0))
        return self._changed.wait_for(lambda: len(submitted) > n_before, wait_s)

    def start(self, sequence: Sequence) -> bool:
        """Decoder thread: whether a sequence may have its first slot. If not, another client's request has
        its place, and it is to end."""
        with self._changed:
            return self.policy.start(sequence)

    def forget(self, request_id: str) -> None:
        """Decoder thread: free the place and the id of a request that has ended. An abort that came too
        late for it must not hit the next request of that id."""
        with self._changed:
            self.policy.forget(request_id)
            self._live.pop(request_id, None)
            self._pending.aborted.discard(request_id)
            self._pending.displaced.pop(request_id, None)

    def fail(self) -> PendingCommands:
        """Decoder thread: refuse everything from now on; returns what was never taken."""
        with self._changed:
            self._failed = True
        return self.take(0)
