"""Batches without a server: real Ray Data, a real engine, a real kill."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import wait_until

N_LINES, PER_PART = 120, 6
COMMAND = [sys.executable, "-m", "serve_app.plugins.batch"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "in.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["n", "text"])
        writer.writerows([n, f"What is {n} plus 1?"] for n in range(N_LINES))
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Without a cluster to connect to, and with a folder of Ray's own."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return kept | {"RAY_TMPDIR": str(tmp_path)[:40], "RAY_USAGE_STATS_ENABLED": "0"}


def options(table: Path, output: Path) -> list[str]:
    fields = json.dumps({"max_tokens": 8, "temperature": 0})
    sizes = ["--slots", "4", "--context", "256", "--lines-per-part", str(PER_PART)]
    return [str(table), str(output), "--column", "text", "--fields", fields, *sizes]


def answers(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def killed(table: Path, tmp_path: Path, environment: dict[str, str]) -> Path:
    """The output of a run that was killed with all of its processes when some parts were there."""
    output = tmp_path / "out.jsonl"
    process = subprocess.Popen(
        [*COMMAND, *options(table, output)],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    folder = tmp_path / "out.jsonl.parts"
    try:
        wait_until(lambda: len(list(folder.glob("part-*"))) >= 2, 120, "no part is written")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    return output


@pytest.mark.long
def test_a_killed_run_goes_on_and_answers_each_line_once(
    killed: Path, table: Path, environment: dict[str, str]
) -> None:
    folder = killed.with_name(killed.name + ".parts")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("part-*.jsonl")}
    assert 2 <= len(before) < N_LINES / PER_PART, "it was killed in the middle"
    seen = dict[Path, int]()
    process = subprocess.Popen(
        [*COMMAND, *options(table, killed)], env=environment, stdout=subprocess.PIPE, text=True
    )
    while process.poll() is None:
        seen |= {path: path.stat().st_mtime_ns for path in before if path.exists()}
        time.sleep(0.05)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert seen == before, "what was there is not written again"
    found = answers(killed)
    assert [row["n"] for row in found] == list(range(N_LINES))
    assert all(row["answer"] and 1 <= row["completion_tokens"] <= 8 for row in found)
    n_answered = int(said.partition(" lines, 0 errors")[0])
    assert 0 < n_answered <= N_LINES - PER_PART * len(before), "engines outlive a kill for a moment"
    assert not folder.exists()


def test_rows_that_cannot_be_answered_stop_nobody(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    bodies = [
        {"prompt": "Hello", "max_tokens": 2},
        {"prompt": 5.5},
        {"prompt": "You", "max_tokens": 2},
    ]
    lines = [
        json.dumps({"custom_id": f"r{n}", "url": "/v1/completions", "body": body})
        for n, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "{"]) + "\n")
    done = subprocess.run(
        [*COMMAND, str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--slots", "2"],
        env=environment,
        timeout=180,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (part,) = (tmp_path / "out").glob("part-*.jsonl")
    found = answers(part)
    assert [row["custom_id"] for row in found] == ["r0", "r1", "r2", None]
    assert [row["response"]["status_code"] for row in found] == [200, 400, 200, 400]
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert "4 lines, 2 errors" in done.stdout
