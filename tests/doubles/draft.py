"""A scripted draft model, for tests of the engine without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from serve_app.base.errors import DecodeError
from serve_app.base.formats import Row
from serve_app.engine.costs.cost_model import Profile

CHEAP = Profile({1: 2e-5, 64: 2e-5}, {8: 2e-5, 256: 2e-5}, {2: 2e-5, 8: 2e-5})
"""Passes that cost next to nothing."""


class FakeDraft:
    """Keeps what every slot was fed, and proposes by a script. `fail_on` names token ids: a batch with one
    of them raises DecodeError. Positions that do not continue a slot raise AssertionError."""

    def __init__(
        self,
        script: Callable[[Sequence[int]], int],
        *,
        n_slots: int,
        n_ctx: int = 64,
        profile: Profile = CHEAP,
        fail_on: Iterable[int] = (),
        reads_states: bool = False,
    ) -> None:
        self.n_ctx = n_ctx
        self.n_batch = 256
        self.profile = profile
        self.slots: list[list[int]] = [[] for _ in range(n_slots)]
        self.reads_states = reads_states
        self.unknown = [0] * n_slots
        """The tokens at the beginning of each slot's text that cannot be fed."""
        self.batches: list[list[Row]] = []
        """Every batch that was submitted, ..."""
        self.places: list[list[int]] = []
        """... and where its rows stand in their texts."""
        self._script = script
        self._fail_on = frozenset(fail_on)
        self._at_row: dict[int, list[int]] = {}

    def first_fed(self, seq_id: int) -> int:
        """See `unknown`."""
        return self.unknown[seq_id]

    def decode(self, rows: Sequence[Row], places: Sequence[int]) -> None:
        """Feed the rows to their slots."""
        self.places.append(list(places))
        self.batches.append(list(rows))
        self._at_row = {}
        for i, (token, position, seq_id, wants_logits) in enumerate(rows):
            slot = self.slots[seq_id]
            if position != len(slot):
                raise AssertionError(f"row {i}: position {position} in a slot of {len(slot)}")
            if position >= self.n_ctx:
                raise AssertionError(f"row {i}: a slot has {self.n_ctx} cells")
            slot.append(token)
            if wants_logits:
                self._at_row[i] = list(slot)
        if self._fail_on.intersection(row[0] for row in rows):
            raise DecodeError("scripted failure")

    def most_likely(self, row: int) -> int:
        """The token that the script has after that row."""
        return self._script(self._at_row[row])

    def truncate(self, seq_id: int, n_past: int) -> None:
        """Drop a slot's tail."""
        del self.slots[seq_id][n_past:]
