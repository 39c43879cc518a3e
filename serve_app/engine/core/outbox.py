"""The events that sequences get at the end of a step."""

from __future__ import annotations

from collections.abc import Iterator

from serve_app.engine.core.sequence import Sequence
from serve_app.errors import CorralError
from serve_app.types import FinishReason, SequenceEnd, TokenDelta

# Where nobody reads along, so many tokens are told at once. They are lost with an engine.
_TOGETHER = 16


class Outbox:
    """Deltas that nobody was told of yet, in their order. Deltas that may be `told_together` are: each
    delivery takes others' time. Decoder thread only."""

    def __init__(self) -> None:
        self._deltas: list[tuple[Sequence, TokenDelta]] = []

    def put(self, sequence: Sequence, delta: TokenDelta) -> None:
        """Take a sequence's newest tokens, or its end."""
        if sequence.untold is not None:
            delta = sequence.untold.then(delta)
        sequence.untold = delta if self._waits(sequence, delta) else None
        if sequence.untold is None:
            self._deltas.append((sequence, delta))

    def _waits(self, sequence: Sequence, delta: TokenDelta) -> bool:
        """Whether more is to be told with it."""
        if not sequence.request.told_together or delta.end is not None:
            return False
        return sequence.n_generated > 1 and len(delta.token_ids) < _TOGETHER

    def end(
        self, sequence: Sequence, reason: FinishReason, error: CorralError | None = None
    ) -> None:
        """End a sequence that did not end itself; nothing happens if it has."""
        if not sequence.finished:
            self.put(sequence, sequence.finish(reason, error=error))

    @property
    def ends(self) -> Iterator[tuple[Sequence, SequenceEnd]]:
        """The sequences that are to be told their end."""
        return ((one, delta.end) for one, delta in self._deltas if delta.end is not None)

    def take(self) -> list[tuple[Sequence, TokenDelta]]:
        """All of them; it is empty then."""
        taken, self._deltas = self._deltas, []
        return taken
