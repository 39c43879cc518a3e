"""The arithmetic of load tests, on streams and books made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from loadtests.common.bursts import parse_answer
from loadtests.load.stream_metrics import (
    Slo,
    accounts,
    ended_line,
    errors,
    figures,
    meets,
    read_journal,
    sent_line,
    token_s,
)
from serve_app.cli.measure.outcomes import (
    ABORTED,
    COMPLETE,
    FAILED,
    REFUSED,
    Outcome,
    Reader,
    StreamedAnswer,
    heard,
)

SLO = Slo(ttft_s=1.0, itl_s=0.1)
DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def delta(text: str | None) -> bytes:
    return event({"id": "chatcmpl-1", "choices": [{"delta": {"content": text}}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}})


def outcome(answer: StreamedAnswer, end: str = COMPLETE, **changes: Any) -> Outcome:
    said = heard(answer) | changes
    return Outcome("1", "chat", 100.0, answer.end_s, end, "", **said)


def plain(number: str, end: str = COMPLETE, **changes: Any) -> Outcome:
    made = Outcome(number, "chat", 100.0, 2.0, end, "", 0.5, (0.1, 0.1), 3, 9, 0, f"a{number}")
    return replace(made, **changes)


def test_coalesced_chunks_come_together_and_share_the_tokens_time() -> None:
    """Two events in one read, and one event that stands for three tokens."""
    got = parse_answer(
        [(1.0, delta("a") + delta("b")), (2.0, delta("cde")), (2.5, usage(5) + DONE)]
    )
    made = outcome(got)
    assert made.ttft_s == 1.0
    assert made.gaps_s == (0.0, 1.0)
    assert made.tokens == 5
    assert token_s(made) == pytest.approx(1.0 / 4)


@pytest.mark.parametrize("silent", [delta(""), delta(None), event({"choices": []})], ids=repr)
def test_empty_deltas_are_no_tokens(silent: bytes) -> None:
    got = parse_answer(
        [(0.5, silent), (1.0, delta("a")), (1.5, silent), (2.0, delta("b")), (3.0, DONE)]
    )
    made = outcome(got)
    assert (made.ttft_s, made.gaps_s, made.tokens) == (1.0, (1.0,), 2)


def test_without_usage_events_are_counted() -> None:
    got = parse_answer([(1.0, delta("a")), (2.0, delta("b")), (3.0, DONE)])
    assert (outcome(got).tokens, got.counted) == (2, False)


def test_an_answer_without_text_has_no_first_token_and_meets_its_slo() -> None:
    made = outcome(parse_answer([(1.0, usage(0) + DONE)]))
    assert (made.ttft_s, token_s(made)) == (None, None)
    assert meets(made, SLO)


def test_one_byte_at_a_time_is_the_same() -> None:
    data = delta("ü") + delta("b") + usage(2) + DONE
    reader = Reader()
    for i in range(len(data)):
        reader.feed(float(i), data[i : i + 1])
    assert (reader.text, reader.answer().tokens, reader.answer().error) == ("üb", 2, None)
    assert reader.answer_id == "chatcmpl-1"


def test_feed_says_how_many_pieces_are_new() -> None:
    reader = Reader()
    fed = [reader.feed(1.0, part) for part in (delta("a") + delta("b"), delta(""), b": ping\n\n")]
    assert fed == [2, 0, 0]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"message": "m", "type": "server_error", "code": "engine_failed"}, "engine_failed"),
        ({"message": "m", "type": "server_error", "code": None}, "server_error"),
        ("broken", "error"),
    ],
)
def test_an_error_event_ends_the_stream_with_its_code(error: object, code: str) -> None:
    reader = Reader()
    reader.feed(1.0, delta("a") + event({"error": error}) + delta("b") + DONE)
    assert (reader.text, reader.error_code) == ("a", code)
    assert reader.answer().error == str(error)


def test_nothing_counts_after_the_end() -> None:
    reader = Reader()
    assert reader.feed(1.0, delta("a") + DONE + delta("b")) == 1
    assert reader.text == "a"


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"ttft_s": 1.0}, True),
        ({"ttft_s": 1.1}, False),
        ({"gaps_s": (0.1, 0.11)}, False),
        ({"gaps_s": (0.1, 0.11), "tokens": 4}, True),  # three tokens in two gaps
        ({"end": ABORTED}, False),
        ({"end": FAILED}, False),
        ({"end": REFUSED}, False),
    ],
)
def test_an_answer_is_good_if_it_is_complete_and_in_time(
    changes: dict[str, Any], good: bool
) -> None:
    assert meets(replace(plain("1"), **changes), SLO) is good


def test_books_that_balance() -> None:
    ends = [COMPLETE, COMPLETE, REFUSED, ABORTED, FAILED]
    made = [plain(str(i), end) for i, end in enumerate(ends)]
    books = accounts(["0", "1", "2", "3", "4"], made)
    assert books.balanced
    assert str(books) == (
        "5 sent = 2 complete + 1 refused + 1 aborted + 1 failed; 0 missing, 0 twice"
    )


@pytest.mark.parametrize(
    ("sent", "made", "missing", "twice"),
    [
        (["1", "2"], [plain("1")], 1, 0),
        (["1"], [plain("1"), plain("1", answer_id=None)], 0, 1),
        (["1"], [plain("1"), plain("2")], 0, 1),
        (["1", "2"], [plain("1"), plain("2", answer_id="a1")], 0, 1),
        (["1", "2"], [plain("1"), plain("1", answer_id=None)], 1, 1),
    ],
    ids=["missing", "ended twice", "never sent", "one answer for two", "missing and twice"],
)
def test_books_that_do_not(sent: list[str], made: list[Outcome], missing: int, twice: int) -> None:
    books = accounts(sent, made)
    assert not books.balanced
    assert (books.missing, books.twice) == (missing, twice)


def test_figures_of_a_run() -> None:
    made = [
        plain("1"),
        plain("2", ttft_s=1.5, gaps_s=(0.3, 0.3)),
        plain("3", ABORTED, tokens=2, gaps_s=(0.1,)),
        plain("4", REFUSED, ttft_s=None, gaps_s=(), tokens=0),
    ]
    found = figures(made, 4.0, SLO)
    assert found["tokens_per_s"] == 8 / 4
    assert found["requests_per_s"] == 2 / 4
    assert found["goodput_per_s"] == 1 / 4
    assert found["good_share"] == pytest.approx(1 / 3)  # who left does not count
    assert found["ttft_p50_s"] == 0.5
    assert found["itl_p50_ms"] == pytest.approx(100)
    assert found["itl_p99_ms"] == pytest.approx(300)
    assert found["e2e_p50_s"] == 2.0
    assert found["user_tokens_per_s_p50"] == pytest.approx(5.0)  # of 10 and 3.3: 1 / 0.2


def test_a_run_without_answers_has_no_percentiles() -> None:
    found = figures([plain("1", REFUSED, ttft_s=None, gaps_s=(), tokens=0)], 1.0, SLO)
    assert found["tokens_per_s"] == 0
    assert found["ttft_p95_s"] is found["itl_p50_ms"] is found["user_tokens_per_s_p50"] is None


def test_errors_by_type() -> None:
    made = [plain(str(i), FAILED, reason="500 engine_failed") for i in range(2)]
    made += [plain("3", FAILED, reason="ConnectionResetError"), plain("4", REFUSED, reason="429")]
    assert errors(made) == {"500 engine_failed": 2, "ConnectionResetError": 1}


def test_a_journal_gives_back_what_was_written() -> None:
    lines = [sent_line("1"), ended_line(plain("1")), sent_line("2"), '{"client": {"cpu_s": 1}}\n']
    assert read_journal(lines) == (["1", "2"], [plain("1")])
