"""What a slow reader makes of the bytes that it got."""

from __future__ import annotations

import json

import pytest

from loadtests.load.slow_readers import COMPLETE, judged


def answer(*events: str, status: int = 200) -> bytes:
    """An HTTP answer with a chunk for each event."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(one.encode()), one.encode()) for one in events)
    return b"HTTP/1.1 %d OK\r\nA: b\r\n\r\n" % status + chunks + b"0\r\n\r\n"


def event(text: str, n_tokens: int | None = None) -> str:
    usage = {} if n_tokens is None else {"usage": {"completion_tokens": n_tokens}}
    return "data: " + json.dumps({"choices": [{"text": text}], **usage}) + "\n\n"


DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("got", "told"),
    [
        (answer(event("a"), event("é", 2), DONE), COMPLETE),
        (answer(event("a"), event("b", 2) + DONE), COMPLETE),
        (answer(event("a", 1), DONE), "1 tokens"),
        (answer(event("a", 2)), "the stream ended without [DONE]"),
        (b'HTTP/1.1 429 No\r\nA: b\r\n\r\n{"message":"No."}', "429: No."),
        (b"HTTP/1.1 502 No\r\nA: b\r\n\r\n", "502"),
        (b"", "no answer"),
    ],
)
def test_only_whole_streams_are_complete(got: bytes, told: str) -> None:
    assert judged(got, 2) == told
