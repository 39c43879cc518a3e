"""What goes over a channel comes out as it went in, however it was cut."""

from __future__ import annotations

import math

import msgspec
import pytest

from serve_app.base.errors import (
    CorralError,
    DecodeError,
    EngineFailedError,
    PromptTooLongError,
    QueueFullError,
)
from serve_app.base.values.answers import (
    Accepted,
    FinishReason,
    SequenceEnd,
    Timings,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from serve_app.channel import protocol
from serve_app.channel.protocol import FrameBuffer, Hello, Item

LOGPROBS = (
    TokenLogprobs(-0.25, ((7, -0.25), (8, -1.5))),
    TokenLogprobs(-math.inf, ((7, 0.0), (8, -math.inf))),
    TokenLogprobs(0.0, ()),
)
GAPS = ((3, 0.5), (0, 0.0), (1, 12.0))
TIMINGS = Timings(0.1, 0.2, 0.3, 0.04, 0.05, 2, 3.5, (1.25, 0.5), 2, 17, GAPS)


def ended(reason: FinishReason, error: CorralError | None = None) -> TokenDelta:
    end = SequenceEnd(reason, Usage(1000, 2, 999), TIMINGS, "###", error)
    return TokenDelta("bye", (1,), end)


DELTAS = [
    TokenDelta("", ()),
    TokenDelta("text", (0, 151_935)),
    TokenDelta("👩‍👩‍👧 naïve 漢字\0\n\u2028", (1, 2, 3)),
    TokenDelta("ab", (7, 8, 9), None, LOGPROBS),
    TokenDelta("a", (7,), None, LOGPROBS[:1], LOGPROBS),
    *(ended(reason) for reason in FinishReason if reason != FinishReason.ERROR),
]
ERRORS = [
    DecodeError("It cannot be decoded."),
    QueueFullError("full", 7),
    PromptTooLongError(9, 8, "prompt", False),
    EngineFailedError("The engine failed: \N{SKULL}"),
]


@pytest.mark.parametrize("delta", [Accepted(), Accepted(0.5, None, True), *DELTAS])
def test_items_come_out_as_they_went_in(delta: TokenDelta | Accepted) -> None:
    sent: list[Item] = [(0, delta), (2**40, delta)]
    (body,) = FrameBuffer().add(protocol.frame(sent))
    assert protocol.items(body) == sent


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_come_with_all_that_they_tell(error: CorralError) -> None:
    (body,) = FrameBuffer().add(protocol.frame([(3, ended(FinishReason.ERROR, error))]))
    ((_, delta),) = protocol.items(body)
    assert isinstance(delta, TokenDelta)
    assert delta.end is not None
    found = delta.end.error
    assert (type(found), found and found.args) == (type(error), error.args)
    assert (delta.end.usage, delta.end.timings) == (Usage(1000, 2, 999), TIMINGS)


def test_frames_may_be_cut_anywhere() -> None:
    sent: list[list[Item]] = [[(1, one)] for one in DELTAS]
    sent.append([(n, one) for n, one in enumerate(DELTAS)])
    data = b"".join(map(protocol.frame, sent))
    for cut in range(len(data) + 1):
        buffer = FrameBuffer()
        bodies = [*buffer.add(data[:cut]), *buffer.add(data[cut:])]
        assert [protocol.items(body) for body in bodies] == sent
        assert buffer.n_bytes == 0


def test_every_byte_may_come_alone() -> None:
    data, buffer = b"".join(protocol.frame([(1, one)]) for one in DELTAS), FrameBuffer()
    bodies = [body for byte in data for body in buffer.add(bytes([byte]))]
    assert [protocol.items(body) for body in bodies] == [[(1, one)] for one in DELTAS]


def test_what_waits_is_counted() -> None:
    data, buffer = protocol.frame([(1, DELTAS[1])]), FrameBuffer()
    assert list(buffer.add(data + data[:-1])) == [data[4:]]
    assert buffer.n_bytes == len(data) - 1


def test_a_hello_comes_out_as_it_went_in() -> None:
    (body,) = FrameBuffer().add(protocol.frame(Hello("secret", "replica")))
    assert len(body) < protocol.MOST_HELLO_BYTES
    assert protocol.hello(body) == Hello("secret", "replica")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"GET / HTTP/1.1", b"\x92\x01\x02", b"\xff" * 99])
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        protocol.hello(body)
    with pytest.raises(msgspec.MsgspecError):
        protocol.items(body)
