"""Which events are told at the end of a step, and which are gathered."""

from __future__ import annotations

from dataclasses import replace

from serve_app.engine.outbox import Outbox
from serve_app.engine.sequence import Sequence
from serve_app.sampling import SamplingParams
from serve_app.types import FinishReason, GenerationRequest, TokenDelta

N_TOGETHER = 16


def a_sequence(*, background: bool) -> Sequence:
    request = GenerationRequest("one", (1, 2), SamplingParams(), "somebody")
    return Sequence(replace(request, background=background), lambda delta: None)


def token(number: int) -> TokenDelta:
    return TokenDelta(str(number), (number,))


def test_somebody_who_waits_is_told_each_token() -> None:
    outbox, one = Outbox(), a_sequence(background=False)
    outbox.put(one, token(1))
    assert outbox.take() == [(one, token(1))]


def test_tokens_in_the_background_are_told_together() -> None:
    outbox, one = Outbox(), a_sequence(background=True)
    for number in range(N_TOGETHER - 1):
        outbox.put(one, token(number))
    assert outbox.take() == []
    outbox.put(one, token(99))
    ((_, told),) = outbox.take()
    assert told.token_ids == (*range(N_TOGETHER - 1), 99)
    outbox.put(one, token(100))
    assert outbox.take() == []


def test_with_its_end_it_is_told_all() -> None:
    outbox, one = Outbox(), a_sequence(background=True)
    outbox.put(one, token(7))
    outbox.end(one, FinishReason.ABORT)
    ((_, told),) = outbox.take()
    assert told.token_ids == (7,)
    assert told.text == "7"
    assert told.end is not None
    assert told.end.reason is FinishReason.ABORT
