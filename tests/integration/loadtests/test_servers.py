"""Servers of the HTTP measurements: started, and gone afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from loadtests.common import servers
from loadtests.common.processes import command_line, tagged
from tests.e2e.conftest import wait_until

# Answers on the port, and has two children, one without its environment; all ignore SIGINT.
STUBBORN = """
import os, signal, sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0:
    signal.pause()
if os.fork() == 0:
    os.execve(sys.executable, [sys.executable, "-c", "import signal; signal.pause()"], {})
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""


def test_nothing_is_left_of_a_server_that_ignores_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", 1)

    def command(_directory: Path, port: int) -> list[str]:
        return [sys.executable, "-c", STUBBORN, str(port)]

    with servers.running(command, lambda url: httpx.get(url).is_success) as server:
        assert httpx.get(server.url).is_success
        assert server.directory is not None
        found = tagged(server.directory)
        assert len(found) == 3
    wait_until(lambda: not any(map(command_line, found)), 10, "its children live")
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url)
    assert tagged(server.directory) == []
    assert not server.directory.exists()


def test_a_paused_server_answers_when_it_goes_on_and_ends_as_any_other() -> None:
    def command(_directory: Path, port: int) -> list[str]:
        return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]

    with servers.running(command, lambda url: httpx.get(url).is_success) as server:
        server.pause()
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(server.url, timeout=0.2)
        server.go_on()
        assert httpx.get(server.url).is_success
        server.pause()
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url)


def test_a_server_that_does_not_start_shows_its_log() -> None:
    def command(_directory: Path, _port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('out of luck')"]

    with (
        pytest.raises(RuntimeError, match="out of luck"),
        servers.running(command, servers.is_healthy),
    ):
        pytest.fail("it is not running")
