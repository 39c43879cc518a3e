"""Requests that another engine began."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.engine import FinishReason, GenerationRequest, PromptTooLongError
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    Inbox,
    SteppedBackend,
    answers,
    ask,
    endless,
    options,
    request,
    running,
    start,
)


def rest_of(whole: Inbox, asked: GenerationRequest, n_tokens: int) -> GenerationRequest:
    """What the next engine is asked for when so many tokens of the whole answer were delivered."""
    generated = tuple(whole.token_ids[:n_tokens])
    return replace(asked, id="rest", generated=generated, n_failovers=1, failovers_s=(2.5,))


@pytest.mark.parametrize(
    ("reply", "stop", "max_tokens"),
    [
        pytest.param(b"abcdef", (), None, id="end of turn"),
        pytest.param(b"abcdef", (), 4, id="max_tokens"),
        pytest.param(b"xENENDy", ("END",), None, id="stop string over tokens"),
        pytest.param(b"abEN", ("END",), None, id="held text at the end"),
        pytest.param("a€b😀c".encode(), (), None, id="characters of bytes"),
        pytest.param("a€😀".encode(), (), 6, id="cut character"),
    ],
)
def test_an_answer_goes_on_where_it_was(
    reply: bytes, stop: tuple[str, ...], max_tokens: int | None
) -> None:
    backend = FakeBackend(answers({"q": reply}), n_slots=1)
    asked = request("whole", "q\n", max_tokens=max_tokens, stop=stop)
    with running(backend) as engine:
        whole = ask(engine, asked)
        for n_tokens in range(len(whole.token_ids)):
            delivered = "".join(delta.text for delta in whole.deltas[:n_tokens])
            rest = ask(engine, rest_of(whole, asked, n_tokens))
            assert delivered + rest.text == whole.text
            assert whole.token_ids[:n_tokens] + rest.token_ids == whole.token_ids
            assert (rest.end.reason, rest.end.stop) == (whole.end.reason, whole.end.stop)
            usage = rest.end.usage
            assert usage.prompt_tokens == 2
            assert usage.completion_tokens == whole.end.usage.completion_tokens
            assert 0 <= usage.cached_tokens <= 2
            assert rest.end.timings.n_resumed == n_tokens
        assert engine.stats().requests.failovers == len(whole.token_ids)


@pytest.mark.parametrize("n_keep", [0, 5, -1])
@pytest.mark.parametrize("n_tokens", [1, 55, 56, 57, 100, 149])
def test_so_does_one_whose_context_was_shifted(n_keep: int, n_tokens: int) -> None:
    asked = replace(request("whole", "abcdefgh", max_tokens=150), context_shift=True, n_keep=n_keep)
    backend = FakeBackend(endless, n_slots=1)
    with running(backend, options(1)) as engine:
        whole = ask(engine, asked)
        rest = ask(engine, rest_of(whole, asked, n_tokens))
    assert whole.token_ids[:n_tokens] + rest.token_ids == whole.token_ids
    assert rest.end.reason is FinishReason.LENGTH


def test_it_tells_what_it_has_been_through() -> None:
    backend = FakeBackend(endless, n_slots=1)
    asked = request("whole", max_tokens=8)
    with running(backend) as engine:
        rest = ask(engine, rest_of(ask(engine, asked), asked, 3))
    spent = rest.end.timings
    assert (spent.n_failovers, spent.failed_over_s, spent.n_resumed) == (1, 2.5, 3)


def test_it_is_taken_however_many_there_are_and_goes_first() -> None:
    backend = SteppedBackend(n_slots=1)
    lost = replace(request("lost", "lost\n"), n_failovers=1)
    with running(backend, options(1, max_waiting=1)) as engine:
        (running_one,) = start(engine, request("a"))
        backend.wait_for_batch()
        waiting, taken = start(engine, request("b"), lost)
        backend.resume()
        for inbox in (running_one, waiting, taken):
            assert inbox.wait().reason is FinishReason.LENGTH
    assert taken.end.timings.queue_s < waiting.end.timings.queue_s


def test_what_does_not_fit_here_is_refused() -> None:
    """An engine of a new configuration may have shorter slots."""
    backend = FakeBackend(endless, n_slots=1)
    lost = replace(request("lost", max_tokens=200), generated=(97,) * 60, n_failovers=1)
    with running(backend, options(1)) as engine, pytest.raises(PromptTooLongError, match="66"):
        ask(engine, lost)
