"""The web sites whose pages may read answers, as browsers heed it.

Source: WHATWG, "Fetch", CORS protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

from serve_app.ingress.access.addresses import host_name, is_loopback

LOCALHOST = "localhost"
"""llama-server's word for all pages that this machine serves, on any port."""


APPS = "apps"
"""The word for pages of desktop apps and editors, which no web site can be."""
_APP_SCHEMES = ("app", "tauri", "vscode-webview", "vscode-file")
"""Source: ollama, envconfig/config.go, `AllowedOrigins`."""


def is_allowed(origin: str, origins: Sequence[str]) -> bool:
    """Whether these sites, or `*`, LOCALHOST or APPS, have that page among them."""
    is_app = origin.partition("://")[0] in _APP_SCHEMES
    return (
        "*" in origins
        or origin in origins
        or (LOCALHOST in origins and _is_local(origin))
        or (APPS in origins and is_app)
    )


def _is_local(origin: str) -> bool:
    scheme, _, host = origin.partition("://")
    name = host_name(host) if scheme in ("http", "https") else None
    return name is not None and (is_loopback(name) or name.endswith(".localhost"))


class Cors(CORSMiddleware):
    """Starlette's, with that word. Other sites' preflights are answered without leave, as llama-server does
    it: 200 and no `Access-Control-Allow-Origin`. `Access-Control-Allow-Headers` is `*`, as there; but what
    browsers ask for is named, as their `*` is not for `Authorization`, nor for requests with cookies."""

    def is_allowed_origin(self, origin: str) -> bool:
        """Whether this web site's pages may read answers."""
        return super().is_allowed_origin(origin) or is_allowed(origin, tuple(self.allow_origins))

    def preflight_response(self, request_headers: Headers) -> Response:
        """The answer to a preflight, for other sites also, without leave."""
        if self.is_allowed_origin(request_headers["origin"]):
            answer = super().preflight_response(request_headers)
            if "sec-fetch-mode" not in request_headers:
                answer.headers["Access-Control-Allow-Headers"] = "*"
            return answer
        return PlainTextResponse("This site's pages may not ask.", headers={"Vary": "Origin"})
