"""Sends a batch's line to this application over ASGI, so that the same code answers it as all requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.ingress.access.auth import BATCH_LINE
from serve_app.ingress.http.request_context import Caller

if TYPE_CHECKING:
    import httpx2


async def post(app: ASGIApp, path: str, body: bytes, caller: Caller) -> httpx2.Response:
    """POST this JSON for that caller. Whatever the application raises is an answer with status 500.
    Cancelling this ends the request."""
    import httpx2  # only who has batches needs it

    async def answer_line(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {}, BATCH_LINE: caller}, receive, send)

    headers = {"content-type": "application/json", "x-request-id": caller.request_id}
    request = httpx2.Request("POST", f"http://batch{path}", headers=headers, content=body)
    transport = httpx2.ASGITransport(answer_line, raise_app_exceptions=False)
    answer = await transport.handle_async_request(request)
    await answer.aread()
    return answer


def retry_after_s(answer: httpx2.Response, default: float) -> float:
    seconds = answer.headers.get("retry-after", "")
    return float(seconds) if seconds.isdigit() else default
