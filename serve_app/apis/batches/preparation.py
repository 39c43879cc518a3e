"""Reads the bodies of requests about batches, and the lines of their files. Runs in workers."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from serve_app.apis.batches.objects import BatchRequest, LineError
from serve_app.server.model_registry import Models
from serve_app.server.workers.worker import MAX_BODY_BYTES

_PREFIX_BYTES = 512
"""Lines are computed in the order of so much of their prompts: lines that begin alike, together."""


def batch(models: Models, request: BatchRequest) -> BatchRequest:
    return request


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of a batch's file, or what is wrong with it. Its body is read when it is asked for."""

    n: int
    """The line's number, from 1, in the file or among those that were checked together."""
    custom_id: str = ""
    start: int = 0
    """The place of the line's `body` in the file, or among these lines."""
    size: int = 0
    prefix: bytes = b""
    error: LineError | None = None

    def move(self, n: int, start: int) -> BatchLine:
        """The line behind so many other lines with so many bytes."""
        return replace(self, n=self.n + n, start=self.start + start)


class _Envelope(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _LineBody(msgspec.Struct):
    """The fields of a request that say what its prompt begins with, as they were sent."""

    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw(b"null")
    background: msgspec.Raw = msgspec.Raw(b"null")


_ENVELOPE, _BODY = msgspec.json.Decoder(_Envelope), msgspec.json.Decoder(_LineBody)
_PROMPT = ("model", "tools", "instructions", "messages", "prompt", "input")
_OFF = (b"null", b"false")
_BLANKS = b" \t\r" + codecs.BOM_UTF8


class _WrongLineError(Exception): ...


def lines(models: Models, body: bytes) -> list[BatchLine]:
    """Check the lines of a batch's file. Before them is a line with the batch's endpoint.

    A line's values are not made into objects: only its outermost fields are looked at."""
    endpoint, _, data = body.partition(b"\n")
    checked, start = [], 0
    for n, line in enumerate(data.split(b"\n"), 1):
        if line.strip(_BLANKS):
            checked.append(_check_line(n, line, start, endpoint.decode()))
        start += len(line) + 1
    return checked


def _check_line(n: int, line: bytes, start: int, endpoint: str) -> BatchLine:
    try:
        custom_id, body, prefix = _read_line(line.removeprefix(codecs.BOM_UTF8), endpoint)
    except _WrongLineError as error:
        code, message, param = error.args
        return BatchLine(n, error=LineError(code=code, message=message, param=param))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        message = "This line is not parseable as valid JSON."
        return BatchLine(n, error=LineError(code="invalid_json_line", message=message))
    return BatchLine(n, custom_id, start + line.index(body), len(body), prefix)


def _read_line(line: bytes, endpoint: str) -> tuple[str, bytes, bytes]:
    if len(line) > MAX_BODY_BYTES:
        message = f"The line has more than {MAX_BODY_BYTES} bytes."
        raise _WrongLineError("line_too_long", message, None)
    try:
        envelope = _ENVELOPE.decode(line)
    except msgspec.ValidationError:
        message = "The line is not a JSON object."
        raise _WrongLineError("invalid_json_line", message, None) from None
    custom_id = envelope.custom_id
    if not isinstance(custom_id, str) or not custom_id or len(custom_id) > 512:
        message = "`custom_id` must be a text of 1 to 512 characters."
        raise _WrongLineError("invalid_custom_id", message, "custom_id")
    if envelope.method != "POST":
        raise _WrongLineError("invalid_method", "`method` must be POST.", "method")
    if envelope.url != endpoint:
        raise _WrongLineError("mismatched_url", f"`url` must be the batch's: {endpoint}.", "url")
    body = bytes(envelope.body)
    try:
        request = _BODY.decode(body)
    except msgspec.ValidationError:
        raise _WrongLineError("invalid_body", "`body` must be an object.", "body") from None
    if bytes(request.stream) not in _OFF:
        raise _WrongLineError("invalid_body", "A batch's line cannot stream.", "body.stream")
    if bytes(request.background) not in _OFF:
        message = "A batch's line is waited for: leave out `background`."
        raise _WrongLineError("invalid_body", message, "body.background")
    return custom_id, body, _prefix(request)


def prefix_of(body: bytes) -> bytes:
    """The beginning of a request's prompt: sorted by it, requests that begin alike are neighbours.

    `body` is a JSON object."""
    return _prefix(_BODY.decode(body))


def _prefix(request: _LineBody) -> bytes:
    fields = (bytes(getattr(request, name))[:_PREFIX_BYTES] for name in _PROMPT)
    return b",".join(fields)[:_PREFIX_BYTES]
