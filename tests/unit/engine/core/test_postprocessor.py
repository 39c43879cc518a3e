"""Which events are told at the end of a step, and which are gathered."""

from __future__ import annotations

from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import FinishReason, Sampled
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.core.postprocessor import Outbox
from serve_app.engine.core.sequence import Sequence
from tests.doubles.backend import FakeVocabulary

N_TOGETHER, N_CTX_SLOT = 16, 64


def a_sequence(*, together: bool) -> Sequence:
    request = GenerationRequest("one", (1, 2), SamplingParams(), told_together=together)
    return Sequence(request, lambda delta: None)


def put(outbox: Outbox, sequence: Sequence, *letters: str) -> None:
    """It generates these, one in each step."""
    for letter in letters:
        sampled = [Sampled(ord(letter))]
        outbox.put(sequence, sequence.accept(sampled, FakeVocabulary(), N_CTX_SLOT))


def told(outbox: Outbox) -> list[str]:
    return [delta.text for _, delta in outbox.take()]


def test_who_reads_along_is_told_each_token() -> None:
    outbox, one = Outbox(), a_sequence(together=False)
    put(outbox, one, *"abc")
    assert told(outbox) == ["a", "b", "c"]


def test_others_are_told_the_first_and_then_several() -> None:
    outbox, one = Outbox(), a_sequence(together=True)
    put(outbox, one, *"ab")
    assert told(outbox) == ["a"]
    put(outbox, one, *"c" * (N_TOGETHER - 2))
    assert told(outbox) == []
    put(outbox, one, *"de")
    assert told(outbox) == ["b" + "c" * (N_TOGETHER - 2) + "d"]


def test_with_its_end_they_are_told_all() -> None:
    outbox, one = Outbox(), a_sequence(together=True)
    put(outbox, one, *"abc")
    outbox.end(one, FinishReason.ABORT)
    (_, _), (_, told) = outbox.take()
    assert (told.text, told.token_ids) == ("bc", (ord("b"), ord("c")))
    assert told.end is not None
    assert told.end.reason is FinishReason.ABORT
