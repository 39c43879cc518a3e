"""Sends a batch's line to this application over ASGI, so that the same code answers it as all requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from serve_app.ingress.access.auth import BATCH_LINE
from serve_app.ingress.http.request_context import Caller

logger = logging.getLogger("corral.ingress")


@dataclass(frozen=True, slots=True)
class LineResponse:
    status: int
    body: bytes
    retry_after_s: float | None
    is_json: bool = True


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller) -> LineResponse:
    """POST this JSON for that caller. Whatever the application raises is an answer with status 500.
    Cancelling this ends the request."""
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
    status, pieces, retry_after_s, is_json = 500, list[bytes](), None, False

    async def receive() -> Message:
        nonlocal received
        if received:
            return {"type": "http.disconnect"}
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, retry_after_s, is_json
        if message["type"] == "http.response.start":
            status = message["status"]
            fields = dict(message["headers"])
            is_json = fields.get(b"content-type", b"").startswith(b"application/json")
            seconds = fields.get(b"retry-after")
            retry_after_s = float(seconds) if seconds is not None and seconds.isdigit() else None
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # its answer has been sent, as an error
        logger.exception("A batch's line failed")
        status = max(status, 500)
    return LineResponse(status, b"".join(pieces), retry_after_s, is_json)
