"""The rest of the program that starts Ray on one machine, once all of it runs.

Ray and Serve take ten times the memory of this module, and nothing of them is needed before the end. So
that program becomes this one by `exec`. As the same process, it stays the parent of Ray's processes, which
end with it.

Lines that Ray's processes write are passed on, as Ray's log monitor would. At the end, Serve and then Ray
end in order.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from serve_app.run.program import discoverable, watch_parent

_LOOK_EVERY_S = 0.25
_END_S = 10.0
"""The time that one of Ray's own processes has to end."""
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
_SOURCE = re.compile(r"worker-.*\.(?:out|err)|(?:raylet|gcs_server).*\.err")
_MOST_BYTES = 2**20
"""The part of a log that is read at a time."""
STOPPING = "Shutting down: running answers may end first."
_END = "import sys; from serve_app.cluster.one_machine import end; end(sys.argv[1])"


@dataclass
class RayLogs:
    """The files of this folder, into which Ray's processes write. One thread at a time."""

    folder: Path
    positions: dict[str, int] = field(default_factory=dict)
    """The bytes of each file that were read."""
    names: dict[str, str] = field(default_factory=dict)
    """The actor that writes each file, where the file has said so."""

    @contextmanager
    def following(self) -> Iterator[ExitStack]:
        """Print what is new from a thread of its own, until the stack is closed."""
        ended = threading.Event()

        def follow() -> None:
            while not ended.wait(_LOOK_EVERY_S):
                self.print_new()
            self.print_new()

        thread = threading.Thread(target=follow, name="corral-ray-logs", daemon=True)
        thread.start()
        with ExitStack() as stack:
            stack.callback(thread.join)
            stack.callback(ended.set)
            yield stack

    def print_new(self) -> None:
        """Print each whole line that is new, behind the name of its process as Ray does."""
        files = list[Path]()
        with suppress(OSError):  # somebody has cleaned /tmp
            files = sorted(path for path in self.folder.iterdir() if _SOURCE.fullmatch(path.name))
        for path in files:
            with suppress(OSError):
                lines = [f"({self._writer(path.stem)}) {line}\n" for line in self._read_lines(path)]
                _print("".join(lines))

    def _read_lines(self, path: Path) -> Iterator[str]:
        start, size = self.positions.get(path.name, 0), path.stat().st_size
        if size == start:
            return
        if size < start:  # the file begins anew
            start = 0
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(_MOST_BYTES)
        whole = data.rfind(b"\n") + 1 or (len(data) if len(data) == _MOST_BYTES else 0)
        self.positions[path.name] = start + whole
        for line in data[:whole].decode(errors="replace").splitlines():
            if found := re.fullmatch(r":(job_id|actor_name|task_name):(.*)", line):
                if found[1] == "actor_name":
                    self.names[path.stem] = found[2]
            else:
                yield line

    def _writer(self, stem: str) -> str:
        if not stem.startswith("worker-"):
            return stem
        pid = stem.rpartition("-")[2]
        return f"{self.names[stem]} pid={pid}" if stem in self.names else f"pid={pid}"


@dataclass
class Keeper:
    """A Ray that this process has started. Its main thread owns it."""

    address: str
    """The address of the head of Ray's cluster."""
    processes: dict[str, int]
    """The process ids of Ray's own processes, in the order in which they end."""
    port: int
    """The server's port."""
    metrics: str
    """The address at which Prometheus finds the metrics."""
    logs: RayLogs
    has_parent: bool
    """Whether this process ends when its standard input does."""

    def replace_program(self) -> NoReturn:
        """Become this module, in the same process. The main thread may call, which has started Ray."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        state = json.dumps(asdict(self), default=str)
        sys.stdout.flush()
        program = [sys.executable, "-P", "-m", "serve_app.cluster.keeper", state]
        os.execv(sys.executable, program)

    def keep(self) -> int:
        """Wait for SIGINT, SIGTERM or the end of a process of Ray's. Returns the exit status."""
        if self.has_parent:
            threading.Thread(target=watch_parent, daemon=True).start()
        with discoverable(self.port, self.metrics):
            lost = self._wait()
        if lost is not None:
            _print(f"Ray's {lost} has ended. Its folder of logs: {self.logs.folder}\n")
            return 1
        _print(f"{STOPPING}\n")
        ending = subprocess.Popen([sys.executable, "-P", "-c", _END, self.address])
        while ending.poll() is None:
            self._look()
        for pid in self.processes.values():
            self._end(pid)
        self.logs.print_new()
        return ending.returncode

    def _wait(self) -> str | None:
        """Print logs until a signal comes, or one of Ray's processes has ended: then its name."""
        while self._look() not in (signal.SIGINT, signal.SIGTERM):
            for name, pid in self.processes.items():
                if _has_ended(pid):
                    return name
        return None

    def _look(self) -> int | None:
        """Print logs, and wait a little for a signal: its number. Python makes one up if this process was
        stopped for longer meanwhile (3.11, `sigtimedwait`)."""
        self.logs.print_new()
        found = signal.sigtimedwait(_SIGNALS, _LOOK_EVERY_S)
        return None if found is None else found.si_signo

    def _end(self, pid: int) -> None:
        """SIGTERM, and after some time SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            for _ in range(int(_END_S / _LOOK_EVERY_S)):
                if _has_ended(pid):
                    return
                self._look()


def _print(text: str) -> None:
    """Write to standard output. What that does not take, as on a full disk, is in Ray's files."""
    with suppress(OSError):
        os.write(1, text.encode())


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def main() -> None:
    state = json.loads(sys.argv[1])
    logs = state.pop("logs")
    logs["folder"] = Path(logs["folder"])
    sys.exit(Keeper(**state, logs=RayLogs(**logs)).keep())


if __name__ == "__main__":
    main()
