"""Processes of measurements and tests: started with signals at their defaults, found, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtests.common.processes import TAG, run_tool, stop, tagged, with_default_signals

# Says which signals it ignores and which are blocked; then it waits.
TELLING = """
import json, signal
ignored = [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
blocked = list(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(json.dumps([ignored, blocked]), flush=True)
signal.pause()
"""
PYTHONS_OWN = {signal.SIGPIPE, signal.SIGXFSZ}
"""Python ignores these from its start on."""


@contextmanager
def ignoring(*numbers: signal.Signals) -> Iterator[None]:
    """Meanwhile, this process ignores these, as a shell's background job does, and has them blocked."""
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextmanager
def started(directory: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command with this tag, from a process that ignores what a terminal sends."""
    environment = os.environ | {TAG: str(directory)}
    with ignoring(signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode()


def test_a_child_of_one_that_ignores_ctrl_c_ends_with_it(tmp_path: Path) -> None:
    command = with_default_signals(sys.executable, "-c", TELLING)
    with started(tmp_path, *map(str, command)) as process:
        ignored, blocked = json.loads(first_line(process))
        assert set(ignored) == PYTHONS_OWN
        assert blocked == []
        assert tagged(tmp_path) == [process.pid]
        assert tagged(tmp_path, "signal.pause") == [process.pid]
        assert tagged(tmp_path, "execvp") == []  # the launcher has become the command
        assert stop(process, tmp_path, timeout_s=30)
        assert process.returncode == -signal.SIGINT


def test_without_it_a_child_ignores_what_its_parent_does(tmp_path: Path) -> None:
    with started(tmp_path, sys.executable, "-c", TELLING) as process:
        ignored, blocked = json.loads(first_line(process))
        assert {signal.SIGINT, signal.SIGTERM} <= set(ignored)
        assert signal.SIGINT in blocked


def test_who_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(2, signal.SIG_IGN); print(flush=True); signal.pause()"
    with started(tmp_path, sys.executable, "-c", deaf) as process:
        first_line(process)
        assert not stop(process, tmp_path, timeout_s=0.1)
        assert process.returncode == -signal.SIGKILL
    assert tagged(tmp_path) == []


@pytest.mark.parametrize(("code", "status"), [("print('said')", 0), ("exit('said')", 1)])
def test_a_tool_is_run_to_its_end(tmp_path: Path, code: str, status: int) -> None:
    log = tmp_path / "log"
    python = Path(sys.executable).name
    assert run_tool([python, "-c", code], log, dict(os.environ)) == status
    assert log.read_text() == "said\n"


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_tool(["no-such-tool"], log, dict(os.environ)) == 1
    assert "No such file" in log.read_text()
