"""A client of any server that speaks the OpenAI API, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]


class ServerError(Exception):
    """The server cannot be reached, or refuses; the message is for people."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status` is HTTP's; None if there was no answer."""
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class Client:
    """Asks one server. Blocking; for one thread."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600) -> None:
        """`timeout_s` is the longest silence."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        # A server of this machine is asked directly, whatever proxy the environment names.
        host = urllib.parse.urlsplit(self.url).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")
        handlers = [urllib.request.ProxyHandler({})] if is_here else []
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> Json:
        """A JSON answer. Raises ServerError."""
        with self._open(path) as response:
            return self._parsed(response.read())

    def text(self, path: str) -> str:
        """An answer as it is. Raises ServerError."""
        with self._open(path) as response:
            return response.read().decode(errors="replace")

    def post(self, path: str, body: Json) -> Json:
        """The JSON answer to a JSON body. Raises ServerError."""
        with self._open(path, body) as response:
            return self._parsed(response.read())

    def delete(self, path: str) -> Json:
        """The JSON answer to a DELETE. Raises ServerError."""
        with self._open(path, method="DELETE") as response:
            return self._parsed(response.read())

    def events(self, path: str, body: Json | None = None) -> Iterator[Json]:
        """Server-sent events with JSON data, until the stream or `[DONE]` ends it. Raises ServerError."""
        with self._open(path, body) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    yield self._parsed(data)
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"The stream from {self.url} broke: {error}") from None

    def models(self) -> list[str]:
        """The ids of the models that are served, the default first. Raises ServerError."""
        return [str(model["id"]) for model in self.get("/v1/models").get("data", ())]

    def _open(
        self, path: str, body: Json | None = None, method: str | None = None
    ) -> http.client.HTTPResponse:
        headers = self._headers | {"Accept": "*/*"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            response: http.client.HTTPResponse = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(_said(error), error.code) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"No server answers at {self.url}: {reason}") from None
        return response

    def _parsed(self, data: bytes) -> Json:
        try:
            body = json.loads(data)
        except ValueError:
            raise ServerError(f"{self.url} answered with something that is not JSON.") from None
        if not isinstance(body, dict):
            raise ServerError(f"{self.url} answered with JSON that is not an object.")
        return body


def _said(error: urllib.error.HTTPError) -> str:
    """The server's error message, in any protocol's form."""
    try:
        body = json.loads(error.read())
        found = body["error"]
        message = found["message"] if isinstance(found, dict) else found
    except (ValueError, KeyError, TypeError, OSError):
        message = error.reason
    if error.code == 401:
        return f"{message} (give a key: --api-key, or CORRAL_API_KEY)"
    return f"{message} (HTTP {error.code})"
