"""Servers of the HTTP measurements: started, and gone afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from loadtests import servers

# Answers on the port, and has a child; both ignore SIGINT.
STUBBORN = """
import os, signal, sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0:
    signal.pause()
HTTPServer(("127.0.0.1", int(sys.argv[1])), SimpleHTTPRequestHandler).serve_forever()
"""


def test_nothing_is_left_of_a_server_that_ignores_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "STOP_TIMEOUT_S", 1)
    directories: list[Path] = []

    def command(directory: Path, port: int) -> list[str]:
        directories.append(directory)
        return [sys.executable, "-c", STUBBORN, str(port)]

    with servers.running(command, lambda url: httpx.get(url).is_success) as url:
        assert httpx.get(url).is_success
        (directory,) = directories
        assert len(servers.processes(directory)) == 2
    with pytest.raises(httpx.TransportError):
        httpx.get(url)
    assert servers.processes(directory) == []
    assert not directory.exists()


def test_a_server_that_does_not_start_shows_its_log() -> None:
    def command(_directory: Path, _port: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('out of luck')"]

    with (
        pytest.raises(RuntimeError, match="out of luck"),
        servers.running(command, servers.is_healthy),
    ):
        pytest.fail("it is not running")
