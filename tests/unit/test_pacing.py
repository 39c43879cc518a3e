"""Processes that compute in turns without knowing it: they are stopped while others have theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve_app.base.sharing.pacing import compute_in_turns
from serve_app.base.sharing.turns import Turns

# An engine that computes for as long as nobody writes a line to it, in a call that nothing can interrupt.
ENGINE = """
import sys
from pathlib import Path
from serve_app.base.sharing import turns
from serve_app.base.sharing.pacing import pace
with turns.join(Path(sys.argv[1])):
    with pace():
        sys.stdin.readline()
    print("done", flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns" / "0-1"


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=os.environ | paths, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_stopped(pid: int, stopped: bool) -> None:
    stat = Path(f"/proc/{pid}/stat")
    while (stat.read_text().rpartition(")")[2].split()[0] == "T") is not stopped:
        time.sleep(0.001)


def test_a_process_is_stopped_while_others_have_their_turns(path: Path) -> None:
    done, other = threading.Event(), Turns(path)
    other.take()
    with running("sleep", "60") as process, ThreadPoolExecutor(1) as pool:
        computing = pool.submit(compute_in_turns, process.send_signal, path, done.wait)
        wait_until_stopped(process.pid, True)
        other.give()
        wait_until_stopped(process.pid, False)
        done.set()
        computing.result()
        wait_until_stopped(process.pid, False)
    other.close()


def test_a_process_has_itself_stopped_while_others_have_their_turns(path: Path) -> None:
    other = Turns(path)
    other.take()
    with running(sys.executable, "-c", ENGINE, str(path)) as engine:
        wait_until_stopped(engine.pid, True)
        other.give()
        wait_until_stopped(engine.pid, False)
        other.take()
        wait_until_stopped(engine.pid, True)
        other.give()
        assert engine.communicate("end\n")[0] == "done\n"
    assert len(list(other._others)) == 0
    other.close()


def test_who_stops_a_process_ends_with_it(path: Path) -> None:
    other = Turns(path)
    other.take()
    with running(sys.executable, "-c", ENGINE, str(path)) as engine:
        wait_until_stopped(engine.pid, True)
        pacer = next(one.pid for _, one in other._others if one.pid != engine.pid)
        engine.kill()
    other.give()
    while Path(f"/proc/{pacer}").exists():
        time.sleep(0.001)
    other.close()


def test_an_engine_without_others_is_left_alone(path: Path) -> None:
    with running(sys.executable, "-c", ENGINE, str(path)) as engine:
        assert engine.communicate("end\n")[0] == "done\n"
    assert not [name for name in path.parent.iterdir() if name.is_socket()]
