"""The attacker's side of one attack: connections to the server, what came back, and what was found."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from loadtests.load.target import Target

CUT = 0
"""The status of a request that got none: the connection was refused, cut, or said nothing in time."""
UNFINISHED, HELD = "unfinished", "held"
"""Ends of requests that were running when the attack was over, and of connections that were open."""
MOST_READ_BYTES = 2**24
REQUEST_S = 30.0
"""Longest silence that an attacker waits for."""
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request."""

    status: int
    body: bytes
    seconds: float
    headers: Mapping[str, str]

    def json(self) -> Any:
        """The body; None if it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def code(self) -> str:
        """Of an error; else empty."""
        told = self.json()
        error = told.get("error") if isinstance(told, dict) else None
        return str(error.get("code") or "") if isinstance(error, dict) else ""


@dataclass(frozen=True, slots=True)
class Shot:
    """A request to send."""

    path: str
    body: bytes
    key: str | None = None


class Scene:
    """Any thread may use it. `keys` are the secrets of API keys by their names; none without keys."""

    def __init__(self, target: Target, seconds: float, keys: Mapping[str, str]) -> None:
        self._until = time.monotonic() + seconds
        self._target = target
        self._address = urlsplit(target.url)
        self._keys = keys
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        """How many requests ended so: by status, with the error's code."""
        self.problems: list[str] = []
        """The problems that were found."""

    @property
    def port(self) -> int:
        """Of the server, on loopback."""
        assert self._address.port is not None
        return self._address.port

    def pids(self, name: str) -> list[int]:
        """The server's processes whose command lines hold the name."""
        return self._target.pids(name)

    def left_s(self) -> float:
        """Seconds that the attack may still take; 0 when it is over."""
        return max(0.0, self._until - time.monotonic())

    def sleep(self, seconds: float) -> None:
        """Wait, but not longer than the attack lasts."""
        time.sleep(max(0.0, min(seconds, self.left_s())))

    def found(self, problem: str) -> None:
        """Tell what should not be; once is enough."""
        with self._lock:
            if problem not in self.problems:
                self.problems.append(problem)

    def headers(self, key: str | None) -> dict[str, str]:
        """The headers that show that key, if there are keys."""
        return {"Authorization": f"Bearer {self._keys[key]}"} if key and self._keys else {}

    def get(self, path: str, key: str | None = "mallory", **headers: str) -> Answer:
        """Ask; see `request`."""
        return self.request("GET", path, None, key, headers)

    def post(self, path: str, body: Any, key: str | None = "mallory", **headers: str) -> Answer:
        """Send this as JSON, or these bytes; see `request`."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, sent, key, JSON | headers)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        key: str | None,
        headers: Mapping[str, str],
    ) -> Answer:
        """The answer, read to its end; one with the status CUT if the server gives none before the attack
        is over. Each request has a connection of its own."""
        start = time.monotonic()
        try:
            with self.opened(method, path, body, key, headers) as response:
                read = self._read(response)
                answer = Answer(
                    response.status, read, time.monotonic() - start, dict(response.headers)
                )
        except (OSError, HTTPException):
            answer = Answer(CUT, b"", time.monotonic() - start, {})
        if answer.status != CUT or self.left_s():
            self.count(answer.status, answer.code)
        else:
            self.note(UNFINISHED)
        return answer

    def count(self, status: int, code: str = "") -> None:
        """A request has ended so."""
        self.note(f"{status or 'cut'} {code}".strip())

    def note(self, end: str, n: int = 1) -> None:
        """So many requests, or connections, have ended so."""
        with self._lock:
            self.answers[end] += n

    @contextmanager
    def opened(
        self,
        method: str,
        path: str,
        body: bytes | None,
        key: str | None,
        headers: Mapping[str, str],
    ) -> Iterator[HTTPResponse]:
        """An answer whose body is not read yet. Raises OSError or HTTPException."""
        timeout_s = max(0.1, min(REQUEST_S, self.left_s()))
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, self.headers(key) | dict(headers))
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def _read(self, response: HTTPResponse) -> bytes:
        read = bytearray()
        while (part := response.read1(65536)) and len(read) < MOST_READ_BYTES:
            read += part
            if not self.left_s():
                break
        return bytes(read)

    def fire(self, shots: Iterable[Shot], at_once: int = 2) -> list[Answer]:
        """Send all of them, so many at a time; those that the attack has no time for are left out."""

        def one(shot: Shot) -> Answer | None:
            return self.post(shot.path, shot.body, shot.key) if self.left_s() else None

        with ThreadPoolExecutor(at_once) as pool:
            return [answer for answer in pool.map(one, shots) if answer is not None]

    def connect(self) -> socket.socket:
        """A connection that nothing was sent on. Raises OSError."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=max(0.1, self.left_s()))

    def raw(self, sent: bytes, wait_s: float = 1.0, *, half_close: bool = False) -> bytes:
        """The answer to these bytes, until the server closes or is silent for so long."""
        got = bytearray()
        with suppress(OSError), self.connect() as wire:
            wire.settimeout(wait_s)
            wire.sendall(sent)
            if half_close:
                wire.shutdown(socket.SHUT_WR)
            while self.left_s() and (part := wire.recv(65536)):
                got += part
        self.count(status_of(bytes(got)))
        return bytes(got)


def status_of(answer: bytes) -> int:
    """The status in the first line of an HTTP answer; CUT if there is none."""
    parts = answer.split(b" ", 2)
    is_http = answer.startswith(b"HTTP/1.") and len(parts) > 1 and parts[1].isdigit()
    return int(parts[1]) if is_http else CUT
