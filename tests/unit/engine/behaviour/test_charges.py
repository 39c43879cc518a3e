"""What sampling takes is charged to who asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from serve_app.engine.core import batch_runner
from serve_app.engine.core import loop as decoder
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.engine import make_guests
from tests.unit.engine.harness import Inbox, WatchedBackend, are_accepted, endless, options, request


class Clock:
    """Stands still unless told."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_measured_and_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only while the dear one's tokens are picked: 100 s for each."""
    clock = Clock()
    for module in (decoder, batch_runner):
        monkeypatch.setattr(module, "time", clock)

    def script(tokens: Sequence[int]) -> int:
        clock.now += 100 if tokens[0] == ord("d") else 0
        return endless(tokens)

    backend = WatchedBackend(script, n_slots=2)
    loop = DecoderLoop(lambda: backend, options(2), make_guests)
    dear = request("dear", "dear\n", max_tokens=3)
    dear = replace(dear, sampling=replace(dear.sampling, top_k=0))
    pairs = [(dear, Inbox()), (request("cheap", "cheap\n", max_tokens=3), Inbox())]
    sequences = [EngineSequence(*pair) for pair in pairs]
    assert are_accepted(loop.enqueue(sequences))
    for _, inbox in pairs:
        inbox.wait()
    loop.close(0)
    assert [one.spent_s for one in sequences] == [300, 0]
