"""A call in a process of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve_app.base.errors import ConfigError
from serve_app.engine.choice.apart import apart

ROOT = Path(__file__).parents[4]
PATIENCE_S = 30.0


def doubled(number: int) -> int:
    if number < 0:
        raise ConfigError("The number is negative.")
    return 2 * number


def slow(fifo: Path) -> int:
    fifo.write_text(str(os.getpid()))  # returns when it is read
    time.sleep(600)
    return 0


def test_results_and_refusals_come_back() -> None:
    assert apart(doubled, 21) == 42
    with pytest.raises(ConfigError, match="negative"):
        apart(doubled, -1)


def test_the_process_ends_with_the_server(tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    call = (
        f"from pathlib import Path; from {apart.__module__} import apart; "
        f"from {__name__} import slow; apart(slow, Path({str(fifo)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", call], cwd=ROOT) as server:
        process = os.pidfd_open(int(fifo.read_text()))
        assert select.select([process], [], [], 0)[0] == [], "it computes"
        server.kill()
    try:
        assert select.select([process], [], [], PATIENCE_S)[0] == [process], "it has ended"
    finally:
        os.close(process)
