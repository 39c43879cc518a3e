"""Processes that a measurement or a test starts: with signals at their defaults, found again, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

TAG = "RAY_TMPDIR"
"""The environment variable that tells whose processes they are: each measurement's directory is its own."""

_LAUNCHER = """
import os, signal, sys
for number in signal.valid_signals():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.execvp(sys.argv[1], sys.argv[1:])
"""


def with_default_signals(*command: str | Path) -> list[str | Path]:
    """The same command, started with every signal at its default and none blocked, whatever this process
    ignores: a shell's background job ignores SIGINT, and so do all that it starts. The process has the same
    id and arguments as without it. A program that is not there ends with status 1, and says so."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command]


def tagged(directory: Path, name: str = "") -> list[int]:
    """Ids of the live processes that were started with this directory as their TAG, and whose command lines
    hold the name: those that have it in their environment, and all that descend from these. A process that
    gives itself a title, as many of Ray's do, writes it over its environment."""
    tag = f"{TAG}={directory}".encode()
    found: set[int] = set()
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        try:
            state, parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(pid)
            if tag in (process / "environ").read_bytes().split(b"\0"):  # of zombies, it is empty
                found.add(pid)
        except OSError:
            continue  # another user's, or gone by now
    new = list(found)
    while new:
        new = [child for one in new for child in children.get(one, ()) if child not in found]
        found.update(new)
    return [pid for pid in sorted(found) if not name or name in command_line(pid)]


def command_line(pid: int) -> str:
    """A process's command line; empty if it has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode(errors="replace")
    return ""


def rollup_kib(pid: int, prefix: str) -> int:
    """The sum of the fields of a process's memory that begin so, as `Pss:` or `Private_`. It is slow, and
    holds the process up: not for large ones. Source: proc(5), `smaps_rollup`. Raises OSError."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(prefix))


def send(directory: Path, number: signal.Signals) -> None:
    """The signal, to all processes that have this tag."""
    for pid in tagged(directory):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def stop(started: subprocess.Popen[bytes], directory: Path, timeout_s: float) -> bool:
    """End a process as Ctrl-C does, with all that have its tag; after that time, by force. Gives whether
    they ended without it. Raises subprocess.TimeoutExpired if even force takes longer."""
    if started.poll() is None:
        started.send_signal(signal.SIGINT)
    by_themselves = within(timeout_s, lambda: not tagged(directory))
    if not by_themselves:
        send(directory, signal.SIGKILL)
        within(timeout_s, lambda: not tagged(directory))
    started.wait(timeout_s)
    return by_themselves


def within(timeout_s: float, condition: Callable[[], bool], every_s: float = 0.1) -> bool:
    """Whether the condition comes to hold in that time; it is asked every so many seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def run_tool(command: Sequence[str | Path], log: Path, environment: dict[str, str]) -> int:
    """Run a program of this Python's environment to its end; what it prints goes to the log. Gives its exit
    status."""
    name, *arguments = command
    program = Path(sys.executable).with_name(str(name))
    with log.open("wb") as output:
        ended = subprocess.run(
            with_default_signals(program, *arguments),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    return ended.returncode
