"""What stands before all routes: API keys, the size of bodies, and how long they may take to come."""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.errors import (
    AuthenticationError,
    CorralError,
    RequestTooLargeError,
    SlowRequestError,
)
from serve_app.ingress.http import errors, request_context
from serve_app.ingress.http.addresses import is_loopback
from serve_app.ingress.http.api_keys import Account, Accounts
from serve_app.ingress.http.request_context import Caller

MAX_BODY_BYTES = 8 * 2**20
"""Largest body of a request."""
BODY_TIMEOUT_S = 60.0
"""Longest time that a body may take to arrive."""

# What load balancers ask for, without keys.
_OPEN_PATHS = frozenset({"/health", "/v1/health"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may come in."""

    api_key_file: Path | None = None
    """See `serve_app.ingress.http.api_keys`; without one, nobody needs a key."""
    allow_anonymous: bool = False
    """Whether that holds for other machines, too."""
    ui: bool | Literal["auto"] = "auto"
    """Whether there is a page for browsers; `auto`: for requests to a loopback address only."""
    cors_origins: tuple[str, ...] = ()
    """Web sites whose pages may ask, as `https://host`; `*` is all."""

    def accounts(self) -> Accounts | None:
        """Those who have keys. Raises ConfigError for a key file that cannot be used."""
        return None if self.api_key_file is None else Accounts(self.api_key_file)


class Guard:
    """ASGI middleware. Lets those in who may, with their bodies read; all others get an error."""

    def __init__(self, app: ASGIApp, accounts: Accounts | None, allow_anonymous: bool) -> None:
        self._app = app
        self._accounts = accounts
        self._allow_anonymous = allow_anonymous

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        counted: Account | None = None
        try:
            account = self._account(scope, headers)
            body = await _read_body(headers, receive)
            if body is None:
                return
            if (
                account is not None and scope["method"] == "POST"
            ):  # all others ask no engine for work
                account.enter()
                counted = account
        except CorralError as error:
            await errors.response(Request(scope), error)(scope, receive, send)
            return
        request_context.enter(Caller(_request_id(headers), account))
        try:
            await self._app(scope, _replay(body, receive), send)
        finally:
            if counted is not None:
                counted.leave()

    def _account(self, scope: Scope, headers: Headers) -> Account | None:
        if scope["path"] in _OPEN_PATHS:
            return None
        if self._accounts is not None:
            return self._accounts.find(_secret(headers))
        if not (self._allow_anonymous or came_to_loopback(scope)):
            raise AuthenticationError(
                "This server has no API keys, and without them it answers its own machine only: set "
                "ingress.api_key_file, or ingress.allow_anonymous: true."
            )
        return None


def _secret(headers: Headers) -> str | None:
    """OpenAI's way to send a key, or Anthropic's."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def came_to_loopback(scope: Scope) -> bool:
    """Whether a request was sent to an address that only this machine reaches."""
    server = scope.get("server")
    return server is not None and is_loopback(server[0])


def _request_id(headers: Headers) -> str:
    """Serve's proxy makes one if the client sends none; ones that would spoil a log are replaced."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())


async def _read_body(headers: Headers, receive: Receive) -> bytes | None:
    """The whole body; None if the client has left. Raises RequestTooLargeError or SlowRequestError."""
    too_large = RequestTooLargeError(f"The body has more than {MAX_BODY_BYTES} bytes.")
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await _received(receive)
                if message["type"] == "http.disconnect":
                    return None
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        message_ = f"The body took longer than {BODY_TIMEOUT_S:.0f} seconds to arrive."
        raise SlowRequestError(message_) from None


async def _received(receive: Receive) -> Message:
    try:
        return await receive()
    except TimeoutError:
        raise
    except Exception:  # Serve's way to say that the client left before it had sent all
        return {"type": "http.disconnect"}


def _replay(body: bytes, receive: Receive) -> Receive:
    """First the body, then what the client still sends: that it leaves."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
