"""Where a text ends, and what is told about it."""

from __future__ import annotations

import pytest

from serve_app.engine import FinishReason
from serve_app.engine.metrics.stats import TokenStats
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    SteppedBackend,
    WatchedBackend,
    answers,
    ask,
    options,
    request,
    running,
    start,
)


@pytest.mark.parametrize(
    ("reply", "stop", "max_tokens", "text", "reason", "found"),
    [
        pytest.param(b"abc", (), None, "abc", "stop", None, id="end of turn"),
        pytest.param(b"", (), None, "", "stop", None, id="end of turn at once"),
        pytest.param(b"abc", (), 2, "ab", "length", None, id="max_tokens"),
        pytest.param(b"abc", (), 3, "abc", "length", None, id="max_tokens before the end token"),
        pytest.param(b"one END two", ("END",), None, "one ", "stop", "END", id="over tokens"),
        pytest.param(b"abcdef", ("x", "cd"), None, "ab", "stop", "cd", id="several stops"),
        pytest.param(b"abcdef", ("cde", "cd"), None, "ab", "stop", "cd", id="one begins another"),
        pytest.param(b"abEN", ("END",), None, "abEN", "stop", None, id="held text at end of turn"),
        pytest.param(b"abEND", ("END",), 4, "abEN", "length", None, id="held text at max_tokens"),
        pytest.param(b"abEND", ("END",), 5, "ab", "stop", "END", id="stop on the last token"),
        pytest.param("a€b😀".encode(), (), None, "a€b😀", "stop", None, id="characters of bytes"),
        pytest.param("a€".encode(), (), 3, "a�", "length", None, id="cut character"),
        pytest.param(b"a\xffb", (), None, "a�b", "stop", None, id="no UTF-8"),
    ],
)
def test_end_of_text(
    reply: bytes,
    stop: tuple[str, ...],
    max_tokens: int | None,
    text: str,
    reason: str,
    found: str | None,
) -> None:
    backend = FakeBackend(answers({"q": reply}), n_slots=1)
    with running(backend) as engine:
        inbox = ask(engine, request("a", "q\n", max_tokens=max_tokens, stop=stop))
    assert (inbox.text, inbox.end.reason, inbox.end.stop) == (text, reason, found)
    assert inbox.end.error is None


def test_nothing_of_a_stop_string_is_ever_shown() -> None:
    backend = FakeBackend(answers({"q": b"xENENDy"}), n_slots=1)
    with running(backend) as engine:
        inbox = ask(engine, request("a", "q\n", stop=("END",), max_tokens=None))
    assert [delta.text for delta in inbox.deltas] == ["x", "", "", "EN", "", ""]


def test_context_is_used_to_its_last_token() -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend, options(1, n_ctx_slot=10)) as engine:
        inbox = ask(engine, request("a", "abcd", max_tokens=None))
    assert inbox.end.reason is FinishReason.LENGTH
    assert len(inbox.token_ids) == 6
    assert inbox.end.usage.prompt_tokens + inbox.end.usage.completion_tokens == 10


def test_usage_and_timings() -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        end = ask(engine, request("a", "abcd", max_tokens=3)).end
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (4, 3)
        assert end.usage.cached_tokens == 0
        assert min(end.timings.queue_s, end.timings.prefill_s, end.timings.decode_s) >= 0
        stats = engine.stats()
        assert stats.tokens == TokenStats(
            4, generated_tokens=3, n_tokens_max=stats.tokens.n_tokens_max
        )
        assert stats.requests.ended == {"length": 1}
        assert (stats.queue.running, stats.queue.waiting) == (0, 0)


def test_stats_while_running() -> None:
    backend = SteppedBackend(n_slots=2)
    with running(backend, options(2, n_batch=4)) as engine:
        start(engine, request("a", "abcdef"))
        backend.wait_for_batch()
        start(engine, request("b"), request("c"))
        backend.step()
        stats = engine.stats()
        assert (stats.queue.running, stats.queue.waiting, stats.timing.steps) == (1, 2, 1)
        (slot, idle) = stats.slots
        assert (slot.state, slot.request_id, slot.n_past) == ("prefill", "a", 4)
        assert (idle.state, idle.request_id) == ("idle", None)
        backend.step()
        stats = engine.stats()
        assert (stats.queue.running, stats.queue.waiting) == (2, 1)
        assert (stats.slots[0].state, stats.slots[0].n_generated) == ("decode", 1)
