"""Asks this application what a batch's line asks, over ASGI: by the code that answers everybody."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from serve_app.ingress.http.auth import BATCH_LINE
from serve_app.ingress.http.request_context import Caller


@dataclass(frozen=True, slots=True)
class LineResponse:
    """The answer."""

    status: int
    body: bytes
    retry_after_s: float | None


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller) -> LineResponse:
    """POST this JSON for that caller. Cancelling it ends the request."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", caller.request_id.encode()),
    ]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
        BATCH_LINE: caller,
    }
    received = False
    status, pieces, retry_after_s = 500, list[bytes](), None

    async def receive() -> Message:
        nonlocal received
        if received:
            return {"type": "http.disconnect"}
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, retry_after_s
        if message["type"] == "http.response.start":
            status = message["status"]
            told = dict(message["headers"]).get(b"retry-after")
            retry_after_s = float(told) if told is not None and told.isdigit() else None
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return LineResponse(status, b"".join(pieces), retry_after_s)
