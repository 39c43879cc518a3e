"""Streams of a server without Ray that cannot go on: their engine is lost for good, or the server ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Corral, model, short_folder
from tests.unit.run.local.test_streams import ENDS, STREAMS

LIMIT_S = 60
LENGTH = 7000
LONG: dict[str, dict[str, Any]] = {
    "/v1/responses": {"max_output_tokens": LENGTH},
    "/api/chat": {"options": {"num_predict": LENGTH, "temperature": 0}},
    "/api/generate": {"options": {"num_predict": LENGTH, "temperature": 0}, "raw": True},
}
DEFAULT: dict[str, Any] = {"max_tokens": LENGTH, "ignore_eos": True}
BEGUN = {
    "/v1/chat/completions": b'"content":"',
    "/v1/completions": b'"text":"',
    "/v1/responses": b"output_text.delta",
    "/v1/messages": b"text_delta",
    "/completion": b'"content":"',
    "/infill": b'"content":"',
    "/api/chat": b'"content":"',
    "/api/generate": b'"response":"',
}
PATHS = [path for path in STREAMS if path != "/infill"]  # the model has no tokens for it


@pytest.fixture(scope="module")
def server(gguf: Path) -> Iterator[Corral]:
    with short_folder() as directory:
        (directory / "m.gguf").write_bytes(gguf.read_bytes())
        sizes = {"n_slots": len(PATHS), "n_ctx_slot": 8192}
        corral = Corral(directory, [model(directory / "m.gguf", "m", **sizes)], local=True)
        try:
            corral.wait_for_model("m")
            yield corral
        finally:
            corral.stop()


class Stream:
    """A stream that has begun."""

    def __init__(self, server: Corral, path: str) -> None:
        self.path = path
        self._wire = socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S)
        body = {"temperature": 0, **STREAMS[path][0], **LONG.get(path, DEFAULT), "stream": True}
        sent = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n"
        self._wire.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + sent)
        self._found = bytearray()
        while BEGUN[path] not in self._found:
            part = self._wire.recv(65536)
            assert part, self._found.decode()
            self._found += part

    def error(self) -> dict[str, Any]:
        """The error in its last event. Checks that it has no end."""
        with contextlib.suppress(ConnectionResetError):
            while part := self._wire.recv(65536):
                self._found += part
        self._wire.close()
        assert self._found.startswith(b"HTTP/1.1 200")
        assert not self._found.endswith(b"0\r\n\r\n")
        lines = [line for line in self._found.splitlines() if b"{" in line]
        assert not any(end in lines[-1] for end in ENDS)
        return STREAMS[self.path][1](json.loads(lines[-1].removeprefix(b"data: ")))


def test_no_stream_of_an_engine_that_is_lost_has_an_end(server: Corral) -> None:
    file = server.directory / "m.gguf"
    (replica,) = server.replicas()
    pid = int(replica["replica_id"].rpartition("-")[2])
    with ThreadPoolExecutor(len(PATHS)) as pool:
        streams = list(pool.map(lambda path: Stream(server, path), PATHS))
    file.rename(file.with_suffix(".away"))
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        assert "m.gguf" in stream.error()["message"], stream.path
    file.with_suffix(".away").rename(file)
    server.wait_for_model("m")


def test_the_second_signal_gives_each_stream_an_error(server: Corral) -> None:
    """The last test of this server."""
    with ThreadPoolExecutor(len(PATHS)) as pool:
        streams = list(pool.map(lambda path: Stream(server, path), PATHS))
        server.process.send_signal(signal.SIGTERM)
        refused = httpx.Response(200)
        while refused.status_code == 200:
            refused = server.http.get("/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "engine_closed"
        server.process.send_signal(signal.SIGTERM)
        for error in pool.map(Stream.error, streams):
            assert error["message"] == "The server is being stopped."
    assert server.process.wait(30) == 0
