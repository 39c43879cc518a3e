"""A client of any server that speaks the OpenAI API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

Json = dict[str, Any]


WITHOUT_TEXT = {"embeddings": "makes embeddings of", "rerank": "ranks", "classify": "classifies"}
"""The purposes of models that are not made to write text, in words."""


def purpose(card: Json) -> str:
    """The use that a model is made for, by its entry in /v1/models: `text` if the server says nothing
    else."""
    return next((name for name in card.get("capabilities") or () if name in WITHOUT_TEXT), "text")


class ServerError(Exception):
    """The server cannot be reached, or refuses; the message is for people."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status` is HTTP's; None if there was no answer."""
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class Client:
    """Asks one server. Blocking; for one thread. All methods raise ServerError."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600) -> None:
        """`timeout_s` is the longest silence."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        try:
            host = httpx2.URL(self.url).host
        except httpx2.InvalidURL as error:
            raise ServerError(f"{url}: {error}") from None
        self._http = httpx2.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            follow_redirects=True,
            # A server of this machine is asked directly, whatever proxy the environment names.
            trust_env=not (host in ("localhost", "::1") or host.startswith("127.")),
        )

    def get(self, path: str) -> Json:
        return self._json("GET", path)

    def post(self, path: str, body: Json) -> Json:
        return self._json("POST", path, body)

    def delete(self, path: str) -> Json:
        return self._json("DELETE", path)

    def text(self, path: str) -> str:
        with self._answer("GET", path) as response:
            return response.read().decode(errors="replace")

    def events(self, path: str, body: Json | None = None) -> Iterator[Json]:
        """Server-sent events with JSON data, until the stream or `[DONE]` ends it."""
        with self._answer("GET" if body is None else "POST", path, body) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data == "[DONE]":
                    return
                if line.startswith("data:"):
                    yield self._parse(data)

    def models(self) -> list[str]:
        """The ids of the models that are served and write text, the default first."""
        cards = self.get("/v1/models").get("data", ())
        return [str(card["id"]) for card in cards if purpose(card) == "text"]

    def _json(self, method: str, path: str, body: Json | None = None) -> Json:
        with self._answer(method, path, body) as response:
            return self._parse(response.read())

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Json | None = None
    ) -> Iterator[httpx2.Response]:
        has_begun = False
        try:
            with self._http.stream(method, path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise ServerError(_error_message(response), response.status_code)
                has_begun = True
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            problem = "The stream from {} broke" if has_begun else "No server answers at {}"
            raise ServerError(f"{problem.format(self.url)}: {error}") from None

    def _parse(self, data: str | bytes) -> Json:
        try:
            body = json.loads(data)
        except ValueError:
            raise ServerError(f"{self.url} answered with something that is not JSON.") from None
        if not isinstance(body, dict):
            raise ServerError(f"{self.url} answered with JSON that is not an object.")
        return body


def _error_message(response: httpx2.Response) -> str:
    """The server's error message, in any protocol's form."""
    try:
        error = response.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    if response.status_code == 401:
        return f"{message} (give a key: --api-key, or CORRAL_API_KEY)"
    return f"{message} (HTTP {response.status_code})"
