"""The guests of a step: work beside the sequences' own, and the moments at which it is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType

from serve_app.base.errors import CorralError
from serve_app.engine.core.scheduler.batch import Batch
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.metrics.stats import Counts
from serve_app.engine.policy.policy import Candidate


@dataclass(slots=True, eq=False)
class Steps:
    """The figures of an engine's steps that guests look at, and what they may have done. Decoder thread
    only."""

    running: SequenceOf[Sequence]
    """The sequences that have a slot, and those that wait for one, as they are now."""
    waiting: SequenceOf[Sequence]
    budget: StepBudget
    counts: Counts
    charge: Callable[[Candidate, float], None]
    """Has a client pay for seconds of the decoder."""
    admit: Callable[[], None]
    """Moves waiting sequences into idle slots."""
    take_commands: Callable[[], bool]
    """Takes in what other threads have sent meanwhile."""
    interlude: Callable[[], None]
    """Serves all others in the middle of a guest's work: takes commands, and computes a step."""
    end: Callable[[Iterable[Sequence], CorralError], None]
    """Ends sequences that cannot go on, and tells them."""
    interrupt: Callable[[], None]
    """Takes all slots away, as there will be another context."""
    resting: Callable[[], AbstractContextManager[None]]
    """Work for nobody, which is cancelled once a request comes."""
    is_draining: bool = False
    worked_at: float = field(default_factory=time.monotonic)
    """The time when the last step ended, or the backend was open."""


class Guest:
    """Work that shares the steps with the sequences. Decoder thread only.

    The core knows its guests by this class alone, and calls them in the order of their list. Each guest
    overrides the moments that it needs. What it does takes time from `Steps.budget`, which it asks before
    it begins.
    """

    counts: Mapping[str, int] = MappingProxyType({})

    @property
    def has_work(self) -> bool:
        """Whether steps are needed for this guest even if no sequence runs or waits."""
        return False

    @property
    def has_urgent_work(self) -> bool:
        """Whether some of that work is not in the background."""
        return self.has_work

    @property
    def rest_at(self) -> float:
        """The time, on `time.monotonic`, from which on `at_rest` has something to do while there are no
        requests; infinite if there is nothing."""
        return math.inf

    def before_schedule(self) -> None:
        """Work before a step is planned, when waiting sequences have been admitted."""

    def before_decode(self, batches: SequenceOf[Batch]) -> None:
        """Look at the batches that are about to be computed."""

    def after_step(self, step_s: float, *, idle: bool) -> None:
        """Work after a step of `step_s` that has delivered its tokens; an `idle` step computed nothing."""

    def at_rest(self) -> None:
        """Do one piece of work while there are no requests."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""

    def deliver(self) -> None:
        """Tell others what ended in this step, after its slots are free and before its deltas leave."""

    def fail(self, error: CorralError) -> None:
        """End all that this guest holds."""

    def close(self, *, healthy: bool) -> None:
        """Free everything, as the last call. The backend is still open, and works if `healthy`."""
