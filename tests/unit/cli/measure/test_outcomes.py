"""What is read out of a stream's bytes, and when it is said to have come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtests.common.bursts import parse_answer

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(value: str) -> bytes:
    return event({"choices": [{"text": value}]})


def test_times_and_counts_of_a_plain_stream() -> None:
    usage = event({"choices": [], "usage": USAGE})
    answer = parse_answer(
        [(1.0, text("a")), (1.5, text("b")), (2.5, text("c")), (2.75, usage + DONE)]
    )
    assert answer.pieces_s == (1.0, 1.5, 2.5)
    assert answer.ttft_s == 1.0
    assert answer.gaps_s == [0.5, 1.0]
    assert answer.end_s == 2.75
    assert (answer.tokens, answer.counted) == (3, True)
    assert (answer.prompt_tokens, answer.cached_tokens) == (7, 2)
    assert answer.error is None


def test_events_of_one_read_share_its_time() -> None:
    answer = parse_answer([(1.0, text("a") + text("b")), (2.0, text("c") + DONE)])
    assert answer.pieces_s == (1.0, 1.0, 2.0)
    assert answer.gaps_s == [0.0, 1.0]


@pytest.mark.parametrize("cut", range(1, len(text("a"))))
def test_an_event_is_there_when_its_line_is_complete(cut: int) -> None:
    whole = text("a")
    newline = whole.index(b"\n") + 1
    answer = parse_answer([(1.0, whole[:cut]), (2.0, whole[cut:] + DONE)])
    assert answer.pieces_s == ((1.0,) if cut >= newline else (2.0,))


def test_a_character_cut_in_two_is_one_piece() -> None:
    body = 'data: {"choices": [{"text": "ü"}]}\n\n'.encode()
    middle = body.index("ü".encode()) + 1
    assert parse_answer([(1.0, body[:middle]), (2.0, body[middle:] + DONE)]).pieces_s == (2.0,)


@pytest.mark.parametrize(
    "silent",
    [
        text(""),
        event({"choices": []}),
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        event({"choices": [{"delta": {"content": None}}]}),
        event({"choices": [{"delta": {}, "finish_reason": "length"}]}),
        b": a comment\n\n",
        b"event: note\n",
        b"\r\n",
    ],
    ids=repr,
)
def test_events_without_text_are_no_pieces(silent: bytes) -> None:
    answer = parse_answer([(1.0, silent), (2.0, text("a")), (3.0, silent), (4.0, DONE)])
    assert answer.pieces_s == (2.0,)
    assert answer.error is None


def test_a_chats_deltas_are_pieces() -> None:
    chunk = event({"choices": [{"delta": {"content": "a"}}]})
    assert parse_answer([(1.0, chunk), (2.0, DONE)]).pieces_s == (1.0,)


def test_without_usage_pieces_are_counted() -> None:
    answer = parse_answer([(1.0, text("a")), (2.0, text("")), (3.0, text("b") + DONE)])
    assert (answer.tokens, answer.counted) == (2, False)
    assert (answer.prompt_tokens, answer.cached_tokens) == (None, None)


def test_usage_may_come_with_the_last_text_and_without_details() -> None:
    last = {"choices": [{"text": "b"}], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
    nothing = event({"choices": [{"text": "a"}], "usage": None})
    answer = parse_answer([(1.0, nothing), (2.0, event(last) + DONE)])
    assert (answer.tokens, answer.counted, answer.cached_tokens) == (5, True, None)
    assert len(answer.pieces_s) == 2


def test_crlf_ends_lines_too() -> None:
    crlf = text("a").replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n"
    assert parse_answer([(1.0, crlf)]).error is None


@pytest.mark.parametrize(
    ("reads", "error", "pieces"),
    [
        ([], "the stream ended without [DONE]", 0),
        ([(1.0, text("a"))], "the stream ended without [DONE]", 1),
        ([(1.0, text("a") + b'data: {"choices": [{"te')], "the stream ended without [DONE]", 1),
        ([(1.0, text("a") + event({"error": "broken"}))], "broken", 1),
    ],
    ids=["nothing", "no end", "cut off", "error event"],
)
def test_an_incomplete_answer_says_so(
    reads: list[tuple[float, bytes]], error: str, pieces: int
) -> None:
    answer = parse_answer(reads)
    assert answer.error == error
    assert answer.tokens == pieces
    assert answer.ttft_s == (1.0 if pieces else None)


def test_what_is_no_json_is_an_error() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        parse_answer([(1.0, b"data: nonsense\n\n")])
