"""The queue from other threads to the decoder thread. Requests are accepted or refused here."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from serve_app.engine.core.commands import Command
from serve_app.engine.core.scheduler.backlog import Forecast
from serve_app.engine.core.scheduler.queue_capacity import QueueCapacity, Verdict, may_embed
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.embedding import Texts
from serve_app.errors import (
    CorralError,
    EngineClosedError,
    EngineFailedError,
    InvalidRequestError,
    QueueFullError,
)
from serve_app.types import GenerationRequest, RequestRecord, account


@dataclass(frozen=True, slots=True)
class PendingCommands:
    """The commands of other threads since the last step."""

    submitted: list[Sequence]
    texts: list[Texts]
    commands: list[Command]
    aborted: set[str]
    displaced: dict[str, QueueFullError]
    """Requests whose place another client's got, and what they end with: those that still wait."""
    deadline: float | None
    """When a drain must be over, on `time.monotonic`; None while the engine is open."""


class CommandQueue:
    """Where other threads leave commands, and where admission is decided.

    Knows the live request ids, so that it can refuse a duplicate or one too many at once, on the
    caller's thread. A request that another engine had accepted is never refused for lack of room.
    `QueueCapacity` says which requests are refused when the queue is full.
    """

    def __init__(
        self,
        capacity: QueueCapacity,
        max_wait_s: float | None,
        background: QueueCapacity | None = None,
    ) -> None:
        """Requests in the background have places of their own, and may wait for as long as they like;
        without any, all are refused."""
        self._changed = threading.Condition()
        self._capacities = {False: capacity, True: background or QueueCapacity(0, 0)}
        self._displaced: dict[str, QueueFullError] = {}
        self._max_wait_s = math.inf if max_wait_s is None else max_wait_s
        self._live: dict[str, RequestRecord] = {}
        self._background: set[str] = set()
        """Of these, those in the background."""
        self._submitted: list[Sequence] = []
        self._texts: list[Texts] = []
        self._held_texts: Counter[str] = Counter()
        """Texts that are not all embedded, by client."""
        self._commands: list[Command] = []
        self._aborted: set[str] = set()
        self._deadline: float | None = None
        self._failed = False
        self._cancel: Callable[[bool], None] = lambda cancelled: None
        self._computed: frozenset[str] = frozenset()
        """Requests of the batch that is being computed."""
        self._is_preemptible = False
        """Whether that batch is cancelled for whoever comes."""
        self._cancels_all = self._is_cancelled = False

    def submit(self, sequences: list[Sequence], forecast: Forecast) -> list[CorralError | None]:
        """Any thread: accept the sequences or say, for each, why not. The forecast is of what was there
        before."""
        with self._changed:
            refusals = [self._accept(sequence, forecast) for sequence in sequences]
            self._update_cancel()
            self._changed.notify()
        return refusals

    def submit_texts(self, requests: list[Texts]) -> list[CorralError | None]:
        """Any thread: accept these texts or say, for each request, why not."""
        with self._changed:
            refusals = [self._accept_texts(request) for request in requests]
            self._update_cancel()
            self._changed.notify()
        return refusals

    def _accept_texts(self, request: Texts) -> CorralError | None:
        client, n_texts = request.account, len(request.tokens)
        if not may_embed(self._held_texts, client, n_texts, background=request.background):
            return QueueFullError("Too many texts wait to be embedded.", 1)
        if closed := self._closed():
            return closed
        self._held_texts[client] += n_texts
        self._texts.append(request)
        request.future.add_done_callback(lambda _: self._forget_texts(client, n_texts))
        return None

    def run_between_steps(self, command: Command) -> None:
        """Any thread: have the command run between two steps, or refused."""
        with self._changed:
            refusal = self._closed()
            if refusal is None:
                self._commands.append(command)
                self._changed.notify()
        if refusal is not None:
            command.refuse(refusal)

    def _forget_texts(self, client: str, n_texts: int) -> None:
        with self._changed:
            self._held_texts[client] -= n_texts
            if not self._held_texts[client]:
                del self._held_texts[client]

    def _closed(self) -> CorralError | None:
        if self._failed:
            return EngineFailedError("The engine has failed and is being restarted.")
        if self._deadline is not None:
            return EngineClosedError("The engine is shutting down.")
        return None

    def _accept(self, sequence: Sequence, forecast: Forecast) -> CorralError | None:
        if closed := self._closed():
            return closed
        if sequence.id in self._live:
            return InvalidRequestError(
                f"A request with the id {sequence.id!r} is already running.", "id"
            )
        request = sequence.request
        capacity = self._capacities[request.background]
        if not request.n_failovers:
            verdict = capacity.ask(request.account)
            if refusal := self._overload(request, verdict, forecast):
                return refusal
            if verdict.displaced is not None:
                self._displace(capacity, verdict.displaced, forecast)
        capacity.take(request.id, request.account, may_be_displaced=not request.n_failovers)
        if request.background:
            self._background.add(request.id)
        self._live[request.id] = RequestRecord(
            request.id, request.http_id, request.client, "waiting"
        )
        self._submitted.append(sequence)
        return None

    def _overload(
        self, request: GenerationRequest, verdict: Verdict, forecast: Forecast
    ) -> QueueFullError | None:
        client, held = request.account, self._capacities[request.background].held
        if not verdict.accepted:
            retry_after_s = forecast.place_free_s(client, held, self._submitted)
            return QueueFullError("All slots and the waiting queue are full.", retry_after_s)
        wait_s = 0.0 if request.background else forecast.wait_s(client, held, self._submitted)
        if wait_s > self._max_wait_s:
            return QueueFullError(
                f"A slot would be free after {wait_s:.0f} seconds; a request may wait for "
                f"{self._max_wait_s:.0f} at most.",
                math.ceil(wait_s),
            )
        return None

    def _displace(self, capacity: QueueCapacity, request_id: str, forecast: Forecast) -> None:
        retry_after_s = forecast.place_free_s(
            self._account(request_id), capacity.held, self._submitted
        )
        self._displaced[request_id] = QueueFullError(
            "All slots and the waiting queue are full, and other clients have fewer requests there.",
            retry_after_s,
        )
        capacity.displace(request_id)

    def _account(self, request_id: str) -> str:
        """Of a live request."""
        background = request_id in self._background
        return account(self._live[request_id].client, background=background)

    def find(self, wanted: str) -> list[RequestRecord]:
        """Any thread: what was accepted of that request and has not ended."""
        with self._changed:
            return [record for record in self._live.values() if record.belongs_to(wanted)]

    def abort(self, request_id: str) -> None:
        """Any thread: end that request if it is live."""
        with self._changed:
            if request_id in self._live:
                self._aborted.add(request_id)
                self._update_cancel()
                self._changed.notify()

    def cancel_with(self, cancel: Callable[[bool], None]) -> None:
        """Decoder thread: how to cancel the batch that is being computed: `Backend.cancel`."""
        with self._changed:
            self._cancel = cancel
            cancel(self._is_cancelled)

    @contextmanager
    def computing(self, request_ids: Iterable[str]) -> Iterator[None]:
        """Decoder thread: a batch for these requests, which is cancelled once all of them are aborted; or
        once a request comes, if all are in the background."""
        with self._changed:
            self._computed = frozenset(request_ids)
            self._is_preemptible = self._computed <= self._background
            self._update_cancel()
        try:
            yield
        finally:
            with self._changed:
                self._computed, self._is_preemptible = frozenset(), False
                self._update_cancel()

    def resting(self) -> AbstractContextManager[None]:
        """Decoder thread: work for nobody, which is cancelled once a request comes."""
        return self.computing(())

    def _update_cancel(self) -> None:
        """Cancel the batch, or allow batches again, if that has changed. With the lock."""
        unwanted = self._cancels_all or (bool(self._computed) and self._computed <= self._aborted)
        unwanted = unwanted or (self._is_preemptible and self._somebody_has_come())
        if unwanted != self._is_cancelled:
            self._is_cancelled = unwanted
            self._cancel(unwanted)

    def _somebody_has_come(self) -> bool:
        return any(not one.request.background for one in self._submitted) or any(
            not one.background for one in self._texts
        )

    def cancel(self) -> None:
        """Any thread: cancel the batch that is being computed, and all that come."""
        with self._changed:
            self._cancels_all = True
            self._update_cancel()

    def drain(self, deadline: float) -> None:
        """Any thread: take no new work; the rest must be over by the deadline."""
        with self._changed:
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
            self._changed.notify()

    def take(self, wait_s: float | None) -> PendingCommands:
        """Decoder thread: what has arrived. If that is nothing, sleeps until there is something, for
        `wait_s` at most; None is for ever."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._submitted
                    or self._texts
                    or self._commands
                    or self._aborted
                    or self._displaced
                    or self._deadline is not None
                ),
                wait_s,
            )
            pending = PendingCommands(
                self._submitted,
                self._texts,
                self._commands,
                self._aborted,
                self._displaced,
                self._deadline,
            )
            self._submitted, self._texts, self._commands = [], [], []
            self._aborted, self._displaced = set(), {}
            return pending

    def started(self, sequences: Iterable[Sequence]) -> None:
        """Decoder thread: these have got their first slot, and nobody may displace them any more. One that
        was displaced in the same moment runs all the same."""
        with self._changed:
            for sequence in sequences:
                request = sequence.request
                self._capacities[request.background].started(sequence.id, request.account)
                self._displaced.pop(sequence.id, None)

    def forget(self, request_id: str) -> None:
        """Decoder thread: the request has ended; its place and its id are free. An abort that came
        too late for it must not hit the next request of that id."""
        with self._changed:
            if request_id in self._live:
                capacity = self._capacities[request_id in self._background]
                capacity.leave(request_id, self._account(request_id))
                del self._live[request_id]
                self._background.discard(request_id)
            self._aborted.discard(request_id)
            self._displaced.pop(request_id, None)

    def fail(self) -> PendingCommands:
        """Decoder thread: refuse everything from now on; returns what was never taken."""
        with self._changed:
            self._failed = True
        return self.take(0)
