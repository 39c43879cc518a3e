"""The page in the browser: static files, which need no key, and what browsers may do with them.

Anybody may ask for them, as often as they like. So they are read once, and an answer costs no thread.
"""

from __future__ import annotations

import hashlib
import mimetypes
from functools import cache
from pathlib import Path
from typing import Literal

from starlette.datastructures import Headers
from starlette.responses import Response
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
_PART = 64 * 2**10
"""The bytes that are handed over at once: a client that reads no more gets no more."""


class _File:
    """A file of the page, and its answers."""

    def __init__(self, path: Path) -> None:
        body = path.read_bytes()
        self._tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        self._parts = [body[begin : begin + _PART] for begin in range(0, len(body), _PART)]
        headers = _HEADERS | {"ETag": self._tag}
        self._not_modified = Response(status_code=304, headers=headers).raw_headers
        media_type = mimetypes.guess_type(path)[0] or "text/plain"
        headers |= {"Content-Length": str(len(body))}
        self._whole = Response(headers=headers, media_type=media_type).raw_headers

    async def answer(self, scope: Scope, _: Receive, send: Send) -> None:
        """Send it, unless the client has it."""
        tags = Headers(scope=scope).get("if-none-match", "").split(",")
        is_known = self._tag in [tag.strip().removeprefix("W/") for tag in tags]
        status, headers = (304, self._not_modified) if is_known else (200, self._whole)
        await send({"type": "http.response.start", "status": status, "headers": [*headers]})
        for part in () if is_known else self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@cache
def _files() -> dict[str, _File]:
    """The page's files, by their names in its folder."""
    return {str(path.relative_to(FOLDER)): _File(path) for path in FOLDER.rglob("*.*")}


class Page:
    """ASGI middleware before API keys. Answers `/`, `/docs` and `/ui/...` for clients that may see the
    page."""

    def __init__(
        self, app: ASGIApp, switch: bool | Literal["auto"], network: NetworkPolicy
    ) -> None:
        self._app = app
        self._may_see = network.is_local if switch == "auto" else network.is_known_name
        self._files = _files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = self._name(scope)
        file = None if name is None else self._files.get(name)
        await (self._app if file is None else file.answer)(scope, receive, send)

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
