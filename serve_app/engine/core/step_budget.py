"""The time of a step that streams can wait. Pure but for its clock: no model, no threads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Of the bound, what decoding and prompts are first planned for; and how fast that follows what steps take.
_FIRST_MARGIN, _LEAST_MARGIN = 0.92, 0.5
_TOO_LONG, _IN_TIME = 0.97, 1.0003  # balanced when one step in a hundred takes too long


class StepBudget:
    """The time from one token of the streams to their next, and what is left of it. Decoder thread only.

    The clock begins when a step has delivered its tokens. Whatever the decoder thread does before it
    delivers the next ones has drawn from the budget when it is done. Copies, mode changes, texts, pictures
    and drafts need not say so. Each part of a step asks before it begins how much is left, and the prompts
    get what decoding leaves. Time that is known to be needed later in the step is `expected`.
    """

    def __init__(
        self, max_stall_ms: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_stall_ms` is the longest that a stream should wait for others; infinite sets no bound."""
        self.max_stall_s = max_stall_ms / 1000
        self._clock = clock
        self._margin = _FIRST_MARGIN
        self._began = self._turn_began = clock()
        self._expected_s, self._turn_s = 0.0, math.inf
        self.reserved_s = 0.0
        """Seconds of the next step that are for a copy which did not fit into this one."""

    def begin(self) -> None:
        """Restart the clock: all streams have another token, or there are none."""
        self._began, self._expected_s = self._clock(), 0.0

    def begin_turn(self, seconds: float) -> None:
        """Begin a step in this engine's turn on cores that others share. Work may take so many seconds, or
        as long as it likes if they are infinite."""
        self._turn_began, self._turn_s = self._clock(), seconds

    @property
    def is_shared(self) -> bool:
        """Whether other engines were active lately on the same cores."""
        return math.isfinite(self._turn_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock began."""
        return self._clock() - self._began

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound."""
        return math.isfinite(self.max_stall_s) or self.is_shared

    @property
    def left_s(self) -> float:
        """Seconds that are left of the bound, and of the turn; infinite without one."""
        return min(self.max_stall_s - self.elapsed_s - self._expected_s, self.turn_left_s)

    @property
    def turn_left_s(self) -> float:
        """Seconds that are left of this engine's turn; infinite if no other engine shares its cores."""
        return self._turn_s - (self._clock() - self._turn_began)

    def expect(self, seconds: float) -> None:
        """Keep so many seconds of this step for work that is still to come."""
        self._expected_s += seconds

    def allows(self, seconds: float) -> bool:
        """Whether streams can ever wait so long, in a step with nothing else."""
        return seconds <= self.max_stall_s

    def fits(self, seconds: float) -> bool:
        """Whether so many seconds fit into what is left of this step."""
        return seconds <= self.left_s

    def prompts_s(self, decode_s: float, n_turns: int = 1) -> float:
        """Seconds that decoding and prompts may take together in this step, of `n_turns` that share what a
        stream may wait for prompts. Where decoding alone takes more than half of the bound, prompts get as
        long as it takes, but never more than the bound."""
        planned_s = self.planned_s(decode_s, n_turns) - self.elapsed_s - self._expected_s
        return min(planned_s, max(self.turn_left_s, 2 * decode_s))

    def planned_s(self, decode_s: float, n_turns: int = 1) -> float:
        """The seconds of `prompts_s` in a step that has just begun, with the machine to itself; infinite
        without a bound."""
        bound_s = self._margin * self.max_stall_s / n_turns
        return max(bound_s, decode_s + min(decode_s, bound_s))

    def observe(self, seconds: float) -> None:
        """Learn how well a step that had both decoding sequences and prompts kept to the bound."""
        change = _IN_TIME if seconds <= self.max_stall_s else _TOO_LONG
        self._margin = min(1.0, max(_LEAST_MARGIN, self._margin * change))
