"""A call in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve_app.engine.backends.apart import apart
from serve_app.errors import ConfigError

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30.0


def doubled(number: int) -> int:
    if number < 0:
        raise ConfigError("The number is negative.")
    return 2 * number


def slow(path: Path) -> int:
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(600)
    return 0


def wait_until(is_so: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)
    assert is_so()  # type: ignore[operator]


def test_results_and_refusals_come_back() -> None:
    assert apart(doubled, 21) == 42
    with pytest.raises(ConfigError, match="negative"):
        apart(doubled, -1)


def test_the_process_ends_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    call = (
        f"from pathlib import Path; from {apart.__module__} import apart; "
        f"from {__name__} import slow; apart(slow, Path({str(path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", call], cwd=ROOT) as server:
        wait_until(path.exists)
        process = Path(f"/proc/{path.read_text()}")
        assert process.exists()
        server.kill()
    wait_until(lambda: not process.exists() or "Z" in (process / "stat").read_text().split()[2])
