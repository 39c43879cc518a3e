"""Connections that speak no HTTP, or break it off: afterwards, everybody else is served as before."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Corral, wait_until

SEED = 20_240_611
SLOW_S = 20
"""Sooner than the server gives slow ones up: who had to wait for them would get no answer."""
BODY = json.dumps({"model": "demo", "prompt": "A", "max_tokens": 8, "stream": True}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
OK = b"HTTP/1.1 200"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(autouse=True)
def unhurt(corral: Corral) -> Iterator[None]:
    """Afterwards, it is well, idle, answers, and nothing failed in it."""
    before = tracebacks(corral)
    yield
    assert corral.http.get("/health").status_code == 200
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    answer = corral.http.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"]
    wait_until(lambda: all(is_idle(corral, model) for model in range(3)), 20, "every model idle")
    found = tracebacks(corral)[len(before) :]
    assert not found, found[0][:4000]


def is_idle(corral: Corral, model: int) -> bool:
    stats = corral.stats(model)
    return (stats["queue"]["running"], stats["queue"]["waiting"]) == (0, 0)


def tracebacks(corral: Corral) -> list[str]:
    """Those in its logs. Not of Serve's proxy, which has one ("async generator ignored GeneratorExit") for
    clients that leave at the right moment, and does nothing wrong."""
    logs = [corral.directory / "log", *corral.directory.glob("session_2*/logs/serve/replica*.log")]
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines()]
    text = "\n".join(line for line in lines if "(ProxyActor" not in line)
    return text.split("Traceback")[1:]


@contextlib.contextmanager
def connection(corral: Corral, timeout_s: float = 0.3) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", corral.port), timeout=timeout_s) as sock:
        yield sock


def sent(corral: Corral, *pieces: bytes, wait: bool = True) -> bytes:
    """What comes back until the server closes or says nothing for a moment."""
    found = bytearray()
    with contextlib.suppress(OSError), connection(corral) as sock:
        for piece in pieces:
            sock.sendall(piece)
        while wait and (part := sock.recv(65536)):
            found += part
    return bytes(found)


def n_answered(corral: Corral, n: int) -> int:
    """How many of so many requests, sent at once on one connection, are answered with 200: no fewer."""
    found = bytearray()
    with connection(corral, timeout_s=30) as sock:
        sock.sendall(GET * n)
        while found.count(OK) < n and (part := sock.recv(65536)):
            found += part
    return found.count(OK)


def test_random_bytes(corral: Corral) -> None:
    chance = random.Random(SEED)
    for _ in range(100):
        noise = chance.randbytes(chance.randrange(1, 400))
        sent(corral, noise + b"\r\n\r\n", wait=False)


def test_mutilated_requests(corral: Corral) -> None:
    chance = random.Random(SEED)
    for _ in range(150):
        spoilt = bytearray(WHOLE)
        for _ in range(chance.randrange(1, 6)):
            where = chance.randrange(len(spoilt))
            end = where + chance.randrange(4)
            spoilt[where:end] = chance.randbytes(chance.randrange(4))
        sent(corral, bytes(spoilt), wait=False)


def test_truncated_requests(corral: Corral) -> None:
    chance = random.Random(SEED)
    for end in chance.sample(range(len(WHOLE)), 60):
        sent(corral, WHOLE[:end], wait=False)


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: -1\r\n",
        b"Content-Length: 99999999999999999999999999\r\n",
        b"Content-Length: 1\r\nContent-Length: 2\r\n",
        b"Content-Length: 0x10\r\n",
        b"Content-Length: 1e3\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"X: " + b"x" * 200_000 + b"\r\n",
        b"".join(b"X-%d: y\r\n" % i for i in range(20_000)),
        b"X-Request-Id: a\x00b\x7f\r\n",
        b"Host: [\r\nAuthorization: \xff\xfe\r\n",
        b"Expect: 100-continue\r\n",
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n",
    ],
    ids=range(13),
)
def test_bad_headers(corral: Corral, headers: bytes) -> None:
    assert not sent(corral, POST + headers + b"\r\n" + BODY).startswith(b"HTTP/1.1 5")


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n", b"-5\r\nhello\r\n", b"ffffffffffffffffff\r\nx", b"5\r\nhello!!\r\n", b"\xff"],
)
def test_bad_chunks(corral: Corral, chunks: bytes) -> None:
    answer = sent(corral, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert not answer.startswith(b"HTTP/1.1 5")


def test_pipelined_requests(corral: Corral) -> None:
    assert n_answered(corral, 20) == 20
    sent(corral, WHOLE * 20, wait=False)
    sent(corral, WHOLE + b"\x00\xff garbage\r\n\r\n" + GET)


def test_slow_clients_hold_nobody_up(corral: Corral) -> None:
    with contextlib.ExitStack() as open_ones:
        slow = [open_ones.enter_context(connection(corral)) for _ in range(40)]
        for i in range(30):
            for sock in slow:
                sock.sendall(WHOLE[i : i + 1])
        assert corral.http.get("/health", timeout=SLOW_S).status_code == 200
        for sock in slow[:20]:
            sock.sendall(WHOLE[30:-1])  # all but a body's last byte
        assert corral.http.get("/health", timeout=SLOW_S).status_code == 200


def test_clients_that_leave_in_mid_stream(corral: Corral) -> None:
    long = json.dumps(json.loads(BODY) | {"max_tokens": 2000, "ignore_eos": True}).encode()
    request = POST + b"Content-Length: %d\r\n\r\n" % len(long) + long
    chance = random.Random(SEED)
    for _ in range(20):
        with connection(corral, timeout_s=30) as sock:
            sock.sendall(request)
            sock.recv(chance.randrange(1, 2000))
