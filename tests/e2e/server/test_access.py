"""Other sites' pages, proxies and slow bodies."""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.conftest import Corral, wait_until

BODY = json.dumps({"model": "demo", "prompt": "A", "max_tokens": 4}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
N_SLOW = 200
MAX_OPEN = 125


def exchanged(corral: Corral, request: bytes) -> bytes:
    """What comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", corral.port), timeout=20) as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "host_not_allowed"),
        ({"X-Forwarded-For": "10.0.0.9"}, "invalid_api_key"),
        ({"Via": "1.1 proxy"}, "invalid_api_key"),
        ({"Origin": "https://evil.example"}, "cross_site_request"),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, "cross_site_request"),
    ],
)
def test_who_only_seems_to_be_here(corral: Corral, headers: dict[str, str], code: str) -> None:
    text = {"Content-Type": "text/plain"}
    answer = corral.http.post("/v1/completions", content=BODY, headers=text | headers)
    assert answer.json()["error"]["code"] == code
    assert corral.http.get("/health", headers=headers).status_code == 200
    page = corral.http.get("/", headers=headers)
    assert (page.status_code == 200) is (code == "cross_site_request"), "anybody may link to it"


def test_the_names_of_this_machine(corral: Corral) -> None:
    for host in (f"localhost:{corral.port}", "[::1]:8000", "127.0.0.1", "corral.localhost"):
        assert corral.http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"200"),
        (b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n", b"401"),
        (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
        (
            b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n"
            b"Connection: close\r\n\r\n",
            b"403",
        ),
    ],
)
def test_request_lines(corral: Corral, line: bytes, status: bytes) -> None:
    assert exchanged(corral, line).split(b" ")[1] == status


@contextlib.contextmanager
def slow_bodies(corral: Corral) -> Iterator[list[socket.socket]]:
    """Connections on which bodies begin and do not end, while others are answered."""
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(N_SLOW):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", corral.port), 20))
            sock.sendall(HEAD + b"Content-Length: 100000\r\n\r\n{")
            slow.append(sock)
        for _ in range(10):
            json_type = {"Content-Type": "application/json"}
            answer = corral.http.post("/v1/completions", content=BODY, headers=json_type)
            assert answer.status_code == 200
        yield slow


def test_slow_bodies_are_ended_and_others_notice_nothing(corral: Corral) -> None:
    with slow_bodies(corral) as slow:
        found = Counter(sock.recv(65536).split(b" ")[1] for sock in slow)
    assert set(found) == {b"429", b"408"}
    assert found[b"429"] >= N_SLOW - MAX_OPEN
    wait_until(lambda: corral.http.get("/health").status_code == 200, 10, "it is well")


def test_a_get_may_have_a_body_that_nobody_reads(corral: Corral) -> None:
    for path in ("/health", "/v1/models"):
        with socket.create_connection(("127.0.0.1", corral.port), timeout=20) as sock:
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n{{"
            sock.sendall(head.encode())
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_large_bodies_still_come_through(corral: Corral) -> None:
    body = {"model": "demo", "prompt": "x" * 7_000_000}
    answer = httpx.post(f"{corral.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
