"""Bodies of answers as JSON."""

from __future__ import annotations

import json

import pytest

from serve_app.server.http import sse


@pytest.mark.parametrize("number", [2**63, 10**25, -(10**25)])
def test_integers_of_any_size(number: int) -> None:
    """A model may write them as an argument of a call."""
    body = {"arguments": {"id": number, "é": "\u2028"}}
    assert json.loads(sse.encoded(body)) == body
    line = sse.one_line(body)
    assert json.loads(line) == body
    assert "\u2028".encode() not in line
    assert json.loads(bytes(sse.json_response([body]).body)) == [body]
