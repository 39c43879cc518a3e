"""The page in the browser: static files, which need no key, and what browsers may do with them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.server.access.network import NetworkPolicy

FOLDER = Path(__file__).parents[2] / "ui"

# The second line of defence against what models write; the first is that the page makes no HTML of it.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",  # it may be kept, and is asked about each time
}


class Page:
    """ASGI middleware before API keys. Answers `/`, `/docs` and `/ui/...` for clients that may see the
    page."""

    def __init__(
        self, app: ASGIApp, switch: bool | Literal["auto"], network: NetworkPolicy
    ) -> None:
        self._app = app
        self._may_see = network.is_local if switch == "auto" else network.is_known_name
        self._files = StaticFiles(directory=FOLDER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._name(scope)
        if name is not None:
            with suppress(HTTPException):  # no such file: the rest of the application answers
                response = await self._files.get_response(name, scope)
                response.headers.update(_HEADERS)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _name(self, scope: Scope) -> str | None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return None
        if not self._may_see(scope, Headers(scope=scope)):
            return None
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in ("", "/"):
            return "index.html" if _takes_html(Headers(scope=scope)) else None
        if path == "/docs":
            return "docs.html"
        folder, _, name = path.removeprefix("/").partition("/")
        return name if folder == "ui" else None


def _takes_html(headers: Headers) -> bool:
    """Whether the client takes HTML: not so Ollama's, which look here whether a server is running."""
    accepted = headers.get("accept", "*/*")
    return "text/html" in accepted or "*/*" in accepted
