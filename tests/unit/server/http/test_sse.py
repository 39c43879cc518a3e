"""Bodies of answers as JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from serve_app.server.answering.answers import EventAnswer
from serve_app.server.http import sse


@pytest.mark.parametrize("number", [2**63, 10**25, -(10**25)])
def test_integers_of_any_size(number: int) -> None:
    """A model may write them as an argument of a call."""
    body = {"arguments": {"id": number, "é": "\u2028"}}
    assert json.loads(sse.encode_json(body)) == body
    line = sse.one_line(body)
    assert json.loads(line) == body
    assert "\u2028".encode() not in line
    assert json.loads(bytes(sse.json_response([body]).body)) == [body]


async def test_a_stream_says_that_it_is_utf_8() -> None:
    """Or some clients read what begins with `text/` as Latin-1."""

    async def events() -> AsyncIterator[bytes]:
        yield sse.data({"text": "é"})

    assert (
        sse.EventStream(events(), EventAnswer()).headers["content-type"]
        == "text/event-stream; charset=utf-8"
    )
