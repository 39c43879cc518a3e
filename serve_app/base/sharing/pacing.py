"""Turns of processes in calls that nothing can interrupt: they are stopped while others have the turn.

    python -m serve_app.base.sharing.pacing FILE PID

stops and continues that process by the turns of that file, until its standard input ends.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from serve_app.base.folders import search_path
from serve_app.base.sharing import turns

logger = logging.getLogger("corral.engine")


def compute_in_turns(
    send_signal: Callable[[int], None], path: Path | None, wait_for_end: Callable[[float], bool]
) -> None:
    """Stop a process while engines of that file have their turns, until it is done. `wait_for_end` waits so
    many seconds for that, and returns whether it is. Without a file, the process is left alone."""
    if path is None:
        return
    with turns.join(path), suppress(ProcessLookupError):
        try:
            is_done = False
            while not is_done:
                send_signal(signal.SIGSTOP)
                turns.current().take()
                send_signal(signal.SIGCONT)
                is_done = wait_for_end(turns.TURN_S)
        finally:
            send_signal(signal.SIGCONT)


@contextmanager
def pace(pid: int | None = None) -> Iterator[None]:
    """Have this whole process, or that one, compute in turns with the thread's other engines within this.
    A process beside it sees to that, and ends with this one. Nothing happens where no other engine is."""
    pacer = None
    if (path := turns.current().shared_file) is not None:
        command = [sys.executable, "-P", "-m", __name__, str(path), str(pid or os.getpid())]
        paths = {"PYTHONPATH": search_path()}
        try:
            # What ends this process's group must not end it while this process is stopped.
            pacer = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=os.environ | paths, start_new_session=True
            )
        except OSError as error:
            logger.warning(
                "Other engines compute more slowly while this one is prepared: %s", error
            )
    try:
        yield
    finally:
        if pacer is not None:
            pacer.communicate()


def main(path: Path, pid: int) -> None:
    def wait_for_end(seconds: float) -> bool:
        return bool(select.select([sys.stdin], [], [], seconds)[0])

    compute_in_turns(partial(os.kill, pid), path, wait_for_end)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
