"""The decoder thread: the only one that touches the backend."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import CorralError, EngineFailedError
from serve_app.base.sharing import turns
from serve_app.base.values.answers import Accepted
from serve_app.base.values.replicas import RequestRecord
from serve_app.engine.backends.base import Backend
from serve_app.engine.cache.manager import KVCacheManager
from serve_app.engine.core.command_queue import Command, CommandQueue
from serve_app.engine.core.engine_core import EngineCore, MakeGuests
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.health import Progress
from serve_app.engine.metrics.stats import CachedPrefixes, EngineStats
from serve_app.engine.policy.policy import SlotPolicy

logger = logging.getLogger("corral.engine")

# After so many seconds without work, guests do what waits for a rest.
_REST_S = 2.0


class DecoderLoop:
    """Runs `EngineCore.step` on a thread of its own, asleep while there is nothing to do.

    The public methods and properties may be used by any thread; `core` belongs to the decoder thread.

    That thread also opens the backend, and closes it: OpenMP keeps a team of workers for each thread that
    has ever computed. With a second team, each step's threads wait asleep instead of spinning, for a
    quarter of the speed. So guests compute there, too. `open_backend` runs once; what it raises,
    `__init__` raises.
    """

    def __init__(
        self,
        open_backend: Callable[[], Backend],
        options: EngineOptions,
        make_guests: MakeGuests = lambda core: [],
    ) -> None:
        self._command_queue = CommandQueue(SlotPolicy(options))
        self.failure: EngineFailedError | None = None
        """The reason why the loop is dead, if it is."""
        self.progress = Progress()
        self._turns, self._stall_s = options.turns, options.max_stall_ms / 1000
        opened: Future[EngineCore] = Future()

        def open_core() -> EngineCore:
            backend = open_backend()
            self._command_queue.cancel_with(backend.cancel)
            return EngineCore(backend, options, self._command_queue, self.progress, make_guests)

        self._thread = threading.Thread(
            target=self._run, args=(open_core, opened), name="corral-decoder", daemon=True
        )
        self._thread.start()
        self.core = opened.result()

    def enqueue(self, sequences: list[Sequence]) -> list[CorralError | Accepted]:
        """Queue the sequences in one go. Returns the acceptance of each, or why it is refused."""
        view = self.core.published.view
        for sequence in sequences:
            sequence.n_likely_cached = view.cached_prefixes.n_cached(
                sequence.request.content_group, sequence.packed_prompt
            )
        return self._command_queue.submit(sequences, view.forecast)

    def stats(self) -> EngineStats:
        """The engine as of one of its last steps."""
        return self.core.published.view.stats

    def cached_prefixes(self) -> CachedPrefixes:
        """The prefixes that prompts could start from, as of one of its last steps."""
        return self.core.published.view.cached_prefixes

    def explain(self, name: str) -> list[RequestRecord]:
        """The records of a request, live or ended lately, by its id, its answer's or its HTTP request's;
        empty if it is unknown."""
        states = {slot.request_id: slot.state for slot in self.stats().slots}
        records = {
            record.id: replace(record, state=states.get(record.id, record.state))
            for record in self._command_queue.find(name)
        }
        records |= {record.id: record for record in self.core.request_log.find(name)}
        return list(records.values())

    def run_between_steps(self, command: Command) -> None:
        """Have a command done between two steps."""
        self._command_queue.run_between_steps(command)

    def run(self, work: Callable[[KVCacheManager], Any]) -> Any:
        """Have work on the KV cache done between two steps, and wait for it. Not for the decoder thread."""
        command = Command(work)
        self.run_between_steps(command)
        return command.future.result()

    def abort(self, request_id: str) -> None:
        """End a request; its slot is free within one step. A batch for nobody else is cancelled.
        Idempotent; an unknown id is ignored."""
        self._command_queue.abort(request_id)

    def close(self, timeout_s: float = 30.0) -> None:
        """Drain: finish what was accepted, refuse the rest, end with an error what is not done after
        `timeout_s`. Blocks until the model is freed. Idempotent."""
        self._command_queue.drain(time.monotonic() + timeout_s)
        self._thread.join(timeout_s)
        self._command_queue.cancel()
        self._thread.join()

    # -- decoder thread ---------------------------------------------------------------------------

    def _run(self, open_core: Callable[[], EngineCore], opened: Future[EngineCore]) -> None:
        with turns.join(self._turns, self._stall_s):
            self._open_and_run(open_core, opened)

    def _open_and_run(
        self, open_core: Callable[[], EngineCore], opened: Future[EngineCore]
    ) -> None:
        try:
            core = open_core()
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(core)
        try:
            while core.take_commands(_wait_s(core)):
                if core.has_work:
                    core.step_in_turn()
                elif time.monotonic() >= _rest_at(core):
                    core.rest()
        except Exception as error:
            logger.exception("The engine failed; every request it had is ended.")
            self.failure = EngineFailedError(f"The engine failed: {error}")
            core.fail(self.failure)
        finally:
            core.close(healthy=self.failure is None)


def _wait_s(core: EngineCore) -> float | None:
    """Seconds to sleep if nothing arrives; None for ever. Others compute meanwhile."""
    if core.has_work:
        return 0.0
    core.turns.give()
    rest_at = _rest_at(core)
    return None if math.isinf(rest_at) else max(0.0, rest_at - time.monotonic())


def _rest_at(core: EngineCore) -> float:
    """The time from which on the engine does what waits for a rest, of all that share its cores."""
    if math.isinf(core.rest_at):
        return core.rest_at
    worked_at = max(core.steps.worked_at, core.turns.others_worked_at)
    return max(core.rest_at, worked_at + _REST_S)
