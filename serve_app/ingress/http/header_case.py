"""The names of answers' headers, written as most servers write them.

HTTP does not care, and some of llama-server's clients compare them as they are.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeaderCase:
    """ASGI middleware: `content-type` becomes `Content-Type`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name.title(), value) for name, value in message.get("headers", ())
                ]
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)
