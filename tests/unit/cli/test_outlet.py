"""Output to files that take none: what the server prints is read all the same."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from serve_app.cli import outlet as outlets
from serve_app.cli import serve
from serve_app.cli.outlet import Outlet
from serve_app.cli.screen import Screen

N_LINES = 5000
LINES = [f"line {number}: {'x' * 60}\n".encode() for number in range(N_LINES)]


def keep_log(log: Path, verbose: Outlet | None) -> None:
    """Have the lines of a server kept."""
    console = Screen(Console(file=io.StringIO()))
    server = serve._Server(
        Path("c.yaml"), {"applications": []}, {}, console, cluster=False, verbose=verbose
    )
    server._served.log = log
    server._keep_log(iter(LINES))  # type: ignore[arg-type]


def test_a_reader_that_leaves_costs_the_lines_that_it_would_have_got(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as pipe:
        broken = Outlet(lambda text: pipe.write(text.encode()))
        keep_log(tmp_path / "logs" / "log", broken)
        broken.close(60)
    assert broken.n_dropped == N_LINES
    *kept, said = (tmp_path / "logs" / "log").read_bytes().splitlines(keepends=True)
    assert kept == LINES
    n_said, _, words = said.partition(b" ")
    assert 0 < int(n_said) <= N_LINES  # some of them may wait still
    assert words == b"lines could not be written.\n"


def test_a_reader_that_stalls_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlets, "MOST_TEXTS", 10)
    goes_on, written = threading.Event(), list[str]()

    def write(text: str) -> None:
        goes_on.wait()
        written.append(text)

    stalled = Outlet(write)
    monkeypatch.setattr(outlets, "MOST_TEXTS", N_LINES + 1)
    keep_log(tmp_path / "log", stalled)
    goes_on.set()
    stalled.close(60)
    assert 10 <= len(written) <= 11
    assert len(written) + stalled.n_dropped == N_LINES
    assert {text.encode() for text in written} <= set(LINES)
    assert (tmp_path / "log").read_bytes().startswith(b"".join(LINES))


def test_a_full_disk_costs_the_log_and_not_the_output() -> None:
    written = list[str]()
    fine = Outlet(written.append)
    keep_log(Path("/dev/full"), fine)
    fine.close(60)
    assert [text.encode() for text in written] == LINES
    assert fine.n_dropped == 0


def test_what_waits_for_a_closed_stdout_fails_nothing_at_the_end() -> None:
    code = (
        "import sys; from serve_app.cli import serve; sys.stdin.readline()\n"
        "try: print('x', flush=True)\n"
        "except OSError: serve._forget_stdout()"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert (process.wait(60), process.stderr.read()) == (0, b"")
