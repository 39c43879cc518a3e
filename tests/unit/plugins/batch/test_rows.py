"""What rows ask, and what lines say."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from serve_app.plugins.batch.rows import CHAT, COMPLETIONS, EMBEDDINGS, Reading, parse_line

CHATTED = {
    "choices": [{"message": {"content": "billing"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2},
}


@pytest.mark.parametrize(
    ("reading", "row", "path", "body"),
    [
        (
            Reading(column="text", system="Be brief.", fields={"max_tokens": 4}),
            {"text": "Hi", "n": 1},
            CHAT,
            {
                "max_tokens": 4,
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                ],
            },
        ),
        (
            Reading(column="turns"),
            {"turns": [{"role": "user", "content": "a"}]},
            CHAT,
            {"messages": [{"role": "user", "content": "a"}]},
        ),
        (Reading(COMPLETIONS, "p"), {"p": "Once"}, COMPLETIONS, {"prompt": "Once"}),
        (Reading(EMBEDDINGS, "p"), {"p": "Once"}, EMBEDDINGS, {"input": "Once"}),
        (
            Reading(fields={"seed": 1, "max_tokens": 4}),
            {"custom_id": "a", "url": COMPLETIONS, "body": {"prompt": "x", "max_tokens": 8}},
            COMPLETIONS,
            {"seed": 1, "prompt": "x", "max_tokens": 8},
        ),
    ],
)
def test_questions(reading: Reading, row: Any, path: str, body: dict[str, Any]) -> None:
    question = reading.question(row)
    assert (question.path, question.body) == (path, body)


@pytest.mark.parametrize(
    ("reading", "row", "said"),
    [
        (Reading(), {"text": "Hi"}, "name its column"),
        (Reading(), {"url": "/v1/files", "body": {}}, "it needs a `body`"),
        (Reading(), {"url": CHAT, "body": {"stream": True}}, "leave out `stream`"),
        (Reading(column="text"), {"other": 1}, "no column text; it has other"),
        (Reading(column="text"), [1], "not a JSON object"),
    ],
)
def test_rows_that_ask_nothing(reading: Reading, row: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        reading.question(row)


def test_a_tables_line_keeps_its_columns() -> None:
    line = Reading(column="text").line({"text": "Hi", "n": 1}, 200, CHATTED)
    assert line.endswith(b"\n")
    assert orjson.loads(line) == {
        "text": "Hi",
        "n": 1,
        "answer": "billing",
        "finish_reason": "stop",
        "prompt_tokens": 9,
        "completion_tokens": 2,
    }


def test_a_text_that_is_embedded() -> None:
    answer = {"data": [{"embedding": [0.5, 1.0]}], "usage": {"prompt_tokens": 2}}
    line = orjson.loads(Reading(EMBEDDINGS, "p").line({"p": "x"}, 200, answer))
    assert line == {"p": "x", "embedding": [0.5, 1.0]}


def test_an_error_keeps_the_row() -> None:
    error = {"error": {"message": "too long"}}
    line = orjson.loads(Reading(column="text").line({"text": "Hi"}, 400, error))
    assert line == {"text": "Hi", "error": {"message": "too long"}}


def test_a_requests_line_is_openais() -> None:
    line = orjson.loads(Reading().line({"custom_id": "a"}, 200, CHATTED))
    assert (line["custom_id"], line["error"]) == ("a", None)
    assert (line["response"]["status_code"], line["response"]["body"]) == (200, CHATTED)


def test_a_row_without_a_name_has_none() -> None:
    refused = orjson.loads(Reading().line(None, 400, {"error": {"message": "x"}}))
    assert (refused["custom_id"], refused["response"]["status_code"]) == (None, 400)


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    assert parse_line(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_a_line_that_is_not_json() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        parse_line(b"{")
