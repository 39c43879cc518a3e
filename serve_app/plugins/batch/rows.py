"""The request of a row, and its line of the output. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from serve_app.apis.batches.journal import line_of

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ENDPOINTS = (CHAT, COMPLETIONS, "/v1/responses", EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class Question:
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows become requests.

    A row of OpenAI's batch format (`custom_id`, `url`, `body`) is one already. Of other rows, a column is
    the user's message, the messages, the prompt to be continued, or the text to be embedded.
    """

    path: str = CHAT
    column: str | None = None
    """The column to read; with None, rows are of OpenAI's batch format."""
    system: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def question(self, row: Any) -> Question:
        """The request of this row. Raises ValueError that says what is wrong with it."""
        if not isinstance(row, dict):
            raise ValueError("The row is not a JSON object.")
        return self._of_request(row) if self.column is None else self._of_column(row, self.column)

    def _of_request(self, row: Mapping[str, Any]) -> Question:
        path, body = row.get("url"), row.get("body")
        if path not in ENDPOINTS or not isinstance(body, dict):
            told = f"The row is not a request: it needs a `body`, and a `url` of {', '.join(ENDPOINTS)}."
            raise ValueError(f"{told} For a table, name its column.")
        if body.get("stream") or body.get("background"):
            raise ValueError(
                "A file's answers cannot be streamed: leave out `stream` and `background`."
            )
        return Question(path, {**self.fields, **body})

    def _of_column(self, row: Mapping[str, Any], column: str) -> Question:
        if column not in row:
            raise ValueError(f"The row has no column {column}; it has {', '.join(map(str, row))}.")
        value = row[column]
        if self.path == EMBEDDINGS:
            return Question(self.path, {**self.fields, "input": value})
        if self.path == COMPLETIONS:
            return Question(self.path, {**self.fields, "prompt": value})
        turns = value if isinstance(value, list) else [{"role": "user", "content": value}]
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Question(self.path, {**self.fields, "messages": [*first, *turns]})

    def line(self, row: Any, status: int, answer: Mapping[str, Any]) -> bytes:
        if self.column is None:
            name = row.get("custom_id") if isinstance(row, dict) else None
            response = {"status_code": status, "request_id": "", "body": answer}
            return line_of(None if name is None else str(name), response)
        told = row if isinstance(row, dict) else {"row": row}
        found = _short_row(answer) if status < 400 else {"error": answer.get("error", answer)}
        return orjson.dumps({**told, **found}, option=orjson.OPT_APPEND_NEWLINE)


def parse_line(line: bytes) -> Any:
    """A line of JSON. Raises ValueError."""
    try:
        return orjson.loads(line.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"The line is not JSON: {error}") from None


def _short_row(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a table gets of an answer."""
    usage = answer.get("usage") or {}
    if "data" in answer:
        vectors = [one["embedding"] for one in answer["data"]]
        return {"embedding": vectors[0] if len(vectors) == 1 else vectors}
    choice = answer["choices"][0]
    message = choice.get("message")
    fields: dict[str, Any] = {"answer": choice["text"] if message is None else message["content"]}
    if message is not None and message.get("tool_calls"):
        fields["tool_calls"] = message["tool_calls"]
    return fields | {
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
    }
