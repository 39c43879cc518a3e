"""The middleware before all routes: checks the network and the API key, and then reads the body."""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.base.errors import (
    BodyEndedError,
    CorralError,
    EngineClosedError,
    InvalidRequestError,
    NoRoomError,
    NotSupportedError,
    SlowRequestError,
)
from serve_app.base.values.answers import Accepted
from serve_app.base.values.requests import Deadline
from serve_app.config.addresses import is_within, network_of
from serve_app.config.schema import IngressConfig
from serve_app.server.access.api_keys import KeyAccounts
from serve_app.server.access.bodies import BodyLimits, BodyReader, is_streamed, is_unread, replay
from serve_app.server.access.network import NetworkPolicy
from serve_app.server.access.turnstile import OpenRequests, Turnstile
from serve_app.server.http import errors, request_context
from serve_app.server.http.request_context import RETRY_S, Caller
from serve_app.server.usage.accounts import KeyAccount
from serve_app.server.usage.ledger import Ledger
from serve_app.server.usage.telemetry import Telemetry

# What load balancers ask for, by any name and without keys.
_LIVENESS_PATHS = frozenset({"/health/live", "/livez"})
_OPEN_PATHS = _LIVENESS_PATHS | {"/health", "/v1/health"}
_ANTHROPICS_PATH = "/v1/messages"
HOLD_S = RETRY_S
"""A client that comes back although there is no room gets its refusal after so long, and cannot ask
meanwhile."""
MOST_HELD, MOST_HELD_BYTES = 256, 64 * 2**10
"""Requests that are held up so at once. Those with larger bodies wait nowhere: bodies come all the same."""
BATCH_LINE = "corral.batch_line"
"""The scope's key of the Caller of a batch's line, which this process asks. Clients cannot write there."""
IGNORED = "x-corral-ignored"
"""The header of answers that names the request's fields which Corral does not support."""
COST = "x-corral-cost"
"""The header of whole answers that has their cost. A stream's headers are sent before anybody knows it."""
FIRST_TOKEN_WITHIN, END_WITHIN = "x-corral-first-token-ms", "x-corral-deadline-ms"
"""The headers of requests with a deadline: for the first token, and for the end of the answer."""
FORECASTS = "x-corral-forecast-first-token-ms", "x-corral-forecast-end-ms"
"""The headers of answers that have the forecast with which the request was accepted."""
TIER = "x-corral-tier"
"""The header of answers that says whether the request runs with all others or in the `background`."""
ANSWER_HEADERS = ["x-request-id", "retry-after", "x-should-retry", "traceparent"]
ANSWER_HEADERS += [IGNORED, COST, TIER, *FORECASTS]
"""The headers that other sites' pages may read."""
MOST_IGNORED, MOST_IGNORED_CHARS = 32, 128
"""The fields that are named at most, and the characters of each name: a path of nested fields is long."""
_BEARER, _KEY = re.compile(r"bearer +([!-~]+) *", re.IGNORECASE), re.compile(r"([!-~]+)")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class AccessMiddleware:
    """ASGI middleware. Lets those in who may, with their bodies read; all others get an error.

    The cheapest checks come first: the network, the key, the key's running requests. Only then, when it is
    the sender's turn, is a body read, if there is a route for it."""

    def __init__(
        self,
        app: ASGIApp,
        config: IngressConfig,
        open_requests: OpenRequests,
        accounts: KeyAccounts | None = None,
        ledger: Ledger | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        """`accounts` are those of the key file, if there is one. The ledger is told what callers use, and
        telemetry observes it."""
        self._app = app
        self._open = open_requests
        self._accounts = accounts
        self._network = NetworkPolicy.of(config)
        self._trusted_proxies = config.trusted_proxies
        # Without keys, who may ask may do what operators do: on their own machine.
        self._operators_are_all = not config.allow_anonymous
        self._bodies = BodyReader(BodyLimits.of(config))
        self._disabled_routes = config.disabled_routes
        self._turnstile = Turnstile()
        self._n_held = 0
        self._ledger = ledger
        self._telemetry = telemetry or Telemetry()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        if "anthropic-version" in headers or scope["path"].startswith(_ANTHROPICS_PATH):
            send = _with_anthropics_id(request_id, send)
        line: Caller | None = scope.get(BATCH_LINE)
        async with AsyncExitStack() as stack:
            try:
                if self._accounts is not None and scope["path"] not in _OPEN_PATHS:
                    await self._accounts.follow()
                caller = line or self._caller(scope, headers, request_id)
                send = _noting_status(caller, send)
                is_new = line is None and scope["path"] not in _LIVENESS_PATHS
                if self._open.is_draining and is_new:
                    raise EngineClosedError("The server is being stopped.")
                self._check_enabled(scope["path"])
                if scope["method"] == "POST":  # all others ask no engine for work
                    if observed := self._telemetry.observe(caller, scope["path"], headers):
                        caller.observer = observed
                        stack.callback(observed.on_end)
                    if self._ledger is not None:
                        caller.counter = self._ledger.counter(
                            caller.key_name, scope["path"], batch=caller.is_batch_line
                        )
                        caller.later = self._ledger.later
                    if line is None:
                        stack.enter_context(self._open.count(caller.holder))
                    await stack.enter_async_context(caller.running())
                is_in_turn = line is None and scope["path"] not in _OPEN_PATHS
                if is_in_turn and _may_wait(scope, headers):
                    await self._turnstile.turn(caller.holder)
                endpoint = _endpoint(scope)
                if line is not None or is_streamed(endpoint):
                    request_context.enter(caller)
                    await self._app(scope, receive, send)
                    return
                body: list[bytes] | None = []
                if endpoint is not None and not is_unread(endpoint):
                    body = await self._bodies.read(caller.holder, headers, receive)
                    _check_arrival(headers, body)
                if caller.observer is not None:
                    caller.observer.on_body(body or ())
            except CorralError as error:
                if isinstance(error, NoRoomError) and line is None:
                    await self._hold_up(scope, headers)
                await errors.response(Request(scope), error, headers=_closing(error, headers))(
                    scope, receive, send
                )
                return
            if body is not None:  # else the client has left
                request_context.enter(caller)
                replayed = replay(body, receive)
                del body  # an answer may take long, and bodies may be large
                await self._app(scope, replayed, send)

    async def _hold_up(self, scope: Scope, headers: Headers) -> None:
        """Let who comes back too early wait, unless too many do, or much is coming."""
        if not _may_wait(scope, headers) or self._n_held >= MOST_HELD:
            return
        self._n_held += 1
        try:
            await asyncio.sleep(HOLD_S)
        finally:
            self._n_held -= 1

    def _caller(self, scope: Scope, headers: Headers, request_id: str) -> Caller:
        account, is_operator = None, self._operators_are_all
        if scope["path"] not in _OPEN_PATHS:
            self._network.check(scope, headers)
            if self._accounts is not None:
                account = self._account(self._accounts, scope, headers)
                is_operator = account.key.admin
        peer = scope.get("client")
        address = "" if peer is None else network_of(peer[0])
        caller = Caller(request_id, account, address, is_operator)
        within = (_milliseconds(headers, name) for name in (FIRST_TOKEN_WITHIN, END_WITHIN))
        caller.answer_by = Deadline(*within).after(-time.monotonic())
        return caller

    def _account(self, accounts: KeyAccounts, scope: Scope, headers: Headers) -> KeyAccount:
        """The account of the request's key, or of the user that a trusted proxy names. That user's browser
        sends other sites' requests as willingly as its own."""
        users, peer = headers.getlist("x-forwarded-user"), scope.get("client")
        if users and peer is not None and is_within(peer[0], self._trusted_proxies):
            self._network.check_site(scope, headers)
            return accounts.of_user(users)
        return accounts.find(secret_of(headers))

    def _check_enabled(self, path: str) -> None:
        if any(path == off or path.startswith(f"{off}/") for off in self._disabled_routes):
            raise NotSupportedError(f"This server does not answer at {path}: it was switched off.")


def _check_arrival(headers: Headers, body: list[bytes] | None) -> None:
    """Refuse a request whose body was lost before this server, with InvalidRequestError. Serve's own proxy
    takes what is behind an offer to upgrade for another protocol, as uvicorn with httptools does."""
    is_sent = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if body == [] and is_sent and "upgrade" in headers:
        raise InvalidRequestError(
            "The body was lost in Ray Serve's proxy, since the request offers to upgrade its connection "
            "(Upgrade). Send it without this offer: Java's HttpClient does with version(HTTP_1_1)."
        )


def _may_wait(scope: Scope, headers: Headers) -> bool:
    declared = headers.get("content-length", "" if scope["method"] == "POST" else "0")
    return declared.isdecimal() and int(declared) <= MOST_HELD_BYTES


def _endpoint(scope: Scope) -> object:
    """The route that answers a POST or DELETE; None if there is none. Other methods have no bodies."""
    if scope["method"] not in ("POST", "DELETE"):
        return None
    for route in scope["app"].routes:
        if route.matches(scope)[0] is Match.FULL:
            return getattr(route, "endpoint", route)
    return None


def _closing(error: CorralError, headers: Headers) -> dict[str, str]:
    """The header that ends a connection. Nobody waits for the rest of a body that comes slowly, or lost
    its place, or for a server that ends. A proxy that expects 100 before it passes a body on takes
    another answer for a failure, unless the connection ends with it: Apache makes it a 500."""
    is_last = isinstance(error, SlowRequestError | BodyEndedError | EngineClosedError)
    return {"Connection": "close"} if is_last or "expect" in headers else {}


def _with_anthropics_id(request_id: str, send: Send) -> Send:
    """The sender of an answer, with the request's id by the name that Anthropic's clients read."""

    async def naming(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["request-id"] = request_id
        await send(message)

    return naming


def _noting_status(caller: Caller, send: Send) -> Send:
    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            caller.on_start(message["status"])
            headers = MutableHeaders(scope=message)
            if caller.ignored:
                headers[IGNORED] = _header_text(caller.ignored)
            if caller.cost:
                headers[COST] = f"{caller.cost:.9f}".rstrip("0").rstrip(".")
            if caller.accepted:
                headers.update(_forecast(caller.accepted))
            if caller.observer is not None:
                headers.update(caller.observer.on_start(message["status"]))
        await send(message)

    return noting


def _milliseconds(headers: Headers, name: str) -> float:
    """The seconds until one of the deadlines. Raises InvalidRequestError."""
    value = headers.get(name)
    if value is None:
        return math.inf
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and int(value)):
        raise InvalidRequestError(f"The header {name} must be 1 to 999999999 milliseconds.", name)
    return int(value) / 1000


def _forecast(accepted: Sequence[Accepted]) -> dict[str, str]:
    """The headers about what a request was accepted with: of several answers, the last one counts."""
    _, _, background = zip(*accepted, strict=True)
    headers = {TIER: "background" if any(background) else "default"}
    for name, *seconds in zip(FORECASTS, *accepted, strict=False):
        if None not in seconds:
            headers[name] = str(math.ceil(1000 * max(seconds)))
    return headers


def _header_text(names: Sequence[str]) -> str:
    """The names as a header can have them; no more than a few."""
    shown = [name[:MOST_IGNORED_CHARS] for name in names[:MOST_IGNORED]]
    return ", ".join(shown).encode("unicode_escape").decode()


def secret_of(headers: Headers) -> str | None:
    """The API key in a request's headers, sent in OpenAI's way or in Anthropic's; None without one. Raises
    InvalidRequestError for two headers of one kind.

    `serve_app/cluster/haproxy` has the same rule: a key that counts there is the key that counts here."""
    authorizations, keys = headers.getlist("authorization"), headers.getlist("x-api-key")
    if len(authorizations) > 1 or len(keys) > 1:
        raise InvalidRequestError(
            "The request has two API keys: send one Authorization or X-Api-Key header."
        )
    for pattern, values in ((_BEARER, authorizations), (_KEY, keys)):
        if values and (match := pattern.fullmatch(values[0])):
            return match[1]
    return None


def _request_id(headers: Headers) -> str:
    """Serve's proxy makes one if the client sends none; ones that would spoil a log are replaced."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
