"""A server that answers as it is told to, for the commands that ask one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Told:
    """What the server answers, by path, and what it was asked."""

    answers: dict[str, tuple[int, str, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    url: str = ""

    def json(self, path: str, content: object, status: int = 200) -> None:
        self.answers[path] = status, "application/json", json.dumps(content).encode()

    def stream(self, path: str, *events: object) -> None:
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.answers[path] = 200, "text/event-stream", (": ping\n\n" + data).encode()


@contextmanager
def served(told: Told) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_DELETE(self) -> None:
            self._answer("DELETE")

        def _answer(self, body: Any) -> None:
            told.asked.append((self.path, dict(self.headers), body))
            status, kind, content = told.answers.get(self.path, (404, "text/plain", b"no"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Not to the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def told() -> Iterator[Told]:
    found = Told()
    with served(found):
        yield found
