"""The guests of a step: work beside the sequences' own, and the moments at which it is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import TYPE_CHECKING

from serve_app.base.errors import CorralError
from serve_app.engine.core.scheduler.batch import Batch
from serve_app.engine.core.sequence import Sequence

if TYPE_CHECKING:
    from serve_app.engine.core.engine_core import EngineCore


class Guest:
    """Work that shares the steps with the sequences. Decoder thread only.

    The core knows its guests by this class alone, and calls them in the order of their list. Each guest
    overrides the moments that it needs. What it does takes time from `EngineCore.budget`, which it asks
    before it begins.
    """

    counts: Mapping[str, int] = MappingProxyType({})

    @property
    def has_work(self) -> bool:
        """Whether steps are needed for this guest even if no sequence runs or waits."""
        return False

    @property
    def rest_at(self) -> float:
        """The time, on `time.monotonic`, from which on `at_rest` has something to do while there are no
        requests; infinite if there is nothing."""
        return math.inf

    def before_schedule(self, core: EngineCore) -> None:
        """Work before a step is planned, when waiting sequences have been admitted."""

    def scheduled(self, core: EngineCore, batches: SequenceOf[Batch]) -> None:
        """Look at the batches that are about to be computed."""

    def after_step(self, core: EngineCore, step_s: float, *, idle: bool) -> None:
        """Work after a step of `step_s` that has delivered its tokens; an `idle` step computed nothing."""

    def at_rest(self, core: EngineCore) -> None:
        """Do one piece of work while there are no requests."""

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""

    def deliver(self) -> None:
        """Tell others what ended in this step, after its slots are free and before its deltas leave."""

    def fail(self, error: CorralError) -> None:
        """End all that this guest holds."""

    def close(self, core: EngineCore, *, healthy: bool) -> None:
        """Free everything, as the last call. The backend is still open, and works if `healthy`."""
