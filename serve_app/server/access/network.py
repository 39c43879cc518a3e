"""Checks who may ask by the network alone: the address asked, proxies on the way, browsers' pages.

Sources: OWASP, "DNS Rebinding"; W3C, "Fetch Metadata Request Headers".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import Scope

from serve_app.base.errors import AuthenticationError, CrossSiteError, HostNotAllowedError
from serve_app.config.addresses import host_name, is_loopback
from serve_app.config.schema import IngressConfig

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
    """Starlette's, with the words LOCALHOST and APPS. Other sites' preflights are answered without leave,
    as llama-server does it: 200 and no `Access-Control-Allow-Origin`. `Access-Control-Allow-Headers` is
    `*`, as there; but what browsers ask for is named, as their `*` is not for `Authorization`, nor for
    requests with cookies."""

    def is_allowed_origin(self, origin: str) -> bool:
        return super().is_allowed_origin(origin) or is_allowed(origin, tuple(self.allow_origins))

    def preflight_response(self, request_headers: Headers) -> Response:
        if self.is_allowed_origin(request_headers["origin"]):
            answer = super().preflight_response(request_headers)
            if "sec-fetch-mode" not in request_headers:
                answer.headers["Access-Control-Allow-Headers"] = "*"
            return answer
        return PlainTextResponse("This site's pages may not ask.", headers={"Vary": "Origin"})


# What reverse proxies add. (nginx adds none of them unless it is told to, but asks by HTTP/1.0.)
_FORWARDED = (
    *("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"),
    "x-forwarded-proto",  # the only one that Envoy adds unless it is told to
)


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """The checks of requests before any key. Pure; any thread."""

    has_keys: bool = False
    allow_anonymous: bool = False
    """Whether, without keys, other machines are answered."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides those of loopback; `*.example.com` is all names below, `*` is all."""
    cors_origins: tuple[str, ...] = ()
    """Web sites whose pages may ask; also `*`, LOCALHOST and APPS."""

    @classmethod
    def of(cls, config: IngressConfig) -> NetworkPolicy:
        sites = tuple(config.allowed_hosts), tuple(config.cors_origins)
        return cls(config.api_key_file is not None, config.allow_anonymous, *sites)

    def check(self, scope: Scope, headers: Headers) -> None:
        """Raises AuthenticationError for requests from other machines, HostNotAllowedError for a
        host name that is not this server's, and CrossSiteError for another site's page."""
        if not (self.has_keys or self.allow_anonymous):
            _check_is_direct(scope, headers)
            self._check_host(headers)
        elif self.allowed_hosts:
            self._check_host(headers)
        if not self.has_keys:
            self.check_site(scope, headers)

    def is_local(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request comes from this machine itself, and to a name of its own."""
        try:
            _check_is_direct(scope, headers)
            self._check_host(headers)
        except (AuthenticationError, HostNotAllowedError):
            return False
        return True

    def is_known_name(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request was sent to a name that this server goes by; any, if none was configured."""
        return not self.allowed_hosts or all(map(self._knows, headers.getlist("host")))

    def _check_host(self, headers: Headers) -> None:
        for host in headers.getlist("host"):  # none in HTTP/1.0, which no browser speaks
            if not self._knows(host):
                raise HostNotAllowedError(
                    f"Requests to the host name {host[:100]!r} are not allowed. To allow them, add it "
                    "to ingress.allowed_hosts."
                )

    def _knows(self, host: str) -> bool:
        name = host_name(host)
        if "*" in self.allowed_hosts:
            return True
        if name is None:
            return False
        if is_loopback(name) or name.endswith(".localhost"):
            return True
        return any(fnmatchcase(name, pattern.lower()) for pattern in self.allowed_hosts)

    def check_site(self, scope: Scope, headers: Headers) -> None:
        """Raises CrossSiteError for the request of another site's page."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site is not None:
            is_own = site in ("same-origin", "none") or _is_navigation(scope, headers)
        else:
            is_own = origin is None or _is_of_host(origin, headers)
        if is_own or (origin is not None and is_allowed(origin, self.cors_origins)):
            return
        raise CrossSiteError(
            f"A page of another site ({(origin or 'unknown')[:100]}) sent the request, without an API key. "
            "To allow it, add the site to ingress.cors_origins."
        )


def _check_is_direct(scope: Scope, headers: Headers) -> None:
    """Raises AuthenticationError for what comes, or may come, from another machine."""
    server = scope.get("server")
    if server is None or not is_loopback(server[0]):
        raise _not_from_here("it was asked from another")
    via = [name for name in _FORWARDED if name in headers]
    if via:
        raise _not_from_here(f"a proxy forwarded this request (it has the header {via[0]!r})")
    if scope.get("http_version") == "1.0":
        raise _not_from_here("this request speaks HTTP/1.0, as reverse proxies do")


def _not_from_here(why: str) -> AuthenticationError:
    return AuthenticationError(
        f"Without API keys, this server answers only its own machine, and {why}. Set "
        "ingress.api_key_file, or ingress.allow_anonymous: true."
    )


def _is_navigation(scope: Scope, headers: Headers) -> bool:
    return (
        scope["method"] == "GET"
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _is_of_host(origin: str, headers: Headers) -> bool:
    """Whether a page was loaded from here, for browsers that do not say: those of plain HTTP."""
    of_page = origin.lower().partition("://")[2]
    own = (headers.get("host"), headers.get("x-forwarded-host"))
    return bool(of_page) and of_page in [host.strip().lower() for host in own if host is not None]
