"""What other threads leave for the decoder thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.core import command_queue
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.policy.forecast import Forecast
from serve_app.engine.policy.policy import SlotPolicy
from tests.unit.engine.harness import options


def test_an_engine_that_sleeps_takes_a_burst_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_queue, "_BURST_PART", 60.0)
    monkeypatch.setattr(command_queue, "_MOST_BURST_S", 60.0)
    queue = CommandQueue(SlotPolicy(options(4)))
    forecast = Forecast(n_slots=4, prompt_token_s=1, token_s=1, n_generated=1)
    with ThreadPoolExecutor() as decoder:
        taken = decoder.submit(queue.take, None)
        for n_preparing in (2, 1, 0):
            request = GenerationRequest(str(n_preparing), (1, 2), n_preparing=n_preparing)
            queue.submit([Sequence(request, lambda delta: None)], forecast)
        submitted = taken.result(30).submitted
    assert [sequence.id for sequence in submitted] == ["2", "1", "0"]
