"""Locust in several processes: the users of one, shared, and told as one."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.common.processes import with_default_signals
from loadtests.common.servers import ROOT
from loadtests.load.stream_metrics import accounts, read_journal
from tests.integration.loadtests.test_load_client import rig

pytestmark = pytest.mark.long
EVENTS, PAUSE_MS = 5, 20
KINDS = ("batch", "chat", "code", "rag")  # in the order of users when weights are equal
MIX = ",".join(f"{kind}=1" for kind in KINDS)


def asked(folder: Path, processes: int, *how: object) -> dict[str, list[dict[str, Any]]]:
    """What each user asked for, in order, of a run with that many workers, or with none if 1."""
    folder.mkdir()
    several = [f"--processes={processes}"] if processes > 1 else []
    files = [f"--csv={folder / 'locust'}", f"--journal={folder / 'journal'}"]
    with rig(EVENTS, PAUSE_MS) as url:
        done = subprocess.run(
            with_default_signals(
                *(sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"),
                *(f"--host={url}", f"--mix={MIX}", *several, *files, *map(str, how)),
            ),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        bodies = [json.loads(text) for text in httpx.get(f"{url}/asked").json()]
    assert done.returncode == 0, done.stdout + done.stderr
    by_user: dict[str, list[dict[str, Any]]] = {}
    for body in bodies:
        by_user.setdefault(body["user"], []).append(body)
    return by_user


def test_two_workers_have_the_users_of_one_process(tmp_path: Path) -> None:
    closed = ("-u", 4, "-r", 4, "-t", "2s", "--think", 0.1, "--seed", 7)
    one = asked(tmp_path / "one", 1, *closed)
    two = asked(tmp_path / "two", 2, *closed)
    assert set(one) == set(two) == {f"{kind}-{i}" for i, kind in enumerate(KINDS)}
    for user, bodies in two.items():  # as the answers are the same, so is all that follows
        assert [a for a, b in zip(bodies, one[user], strict=False) if a != b] == [], user

    with (tmp_path / "two" / "locust_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    assert {(name, "rag") for name in ("TTFT", "ITL", "E2E", "TOKENS/S", "GOOD")} <= set(rows)
    n_sent = 0
    for worker in (0, 1):
        lines = (tmp_path / "two" / f"journal-{worker}").read_text().splitlines()
        sent, outcomes = read_journal(lines)
        books = accounts(sent, outcomes)
        assert books.balanced
        assert books.complete > 0
        assert "client" in json.loads(lines[-1])
        n_sent += len(sent)
    assert n_sent >= sum(map(len, two.values()))  # what was sent last may not have been read
    told = sum(int(row["Request Count"]) for (name, _), row in rows.items() if name == "E2E")
    assert 0 < told <= n_sent
    assert not (tmp_path / "two" / "journal").exists()


def test_arrivals_are_shared_out(tmp_path: Path) -> None:
    """Every request once, each with a body of its own."""
    opened = asked(tmp_path / "run", 3, "--arrivals", 40, "-t", "2s", "--seed", 7)
    numbers = sorted(int(user.rpartition("-")[2]) for user in opened)
    assert {len(bodies) for bodies in opened.values()} == {1}
    assert len({json.dumps(bodies) for bodies in opened.values()}) == len(opened)
    assert numbers[-1] > 40
    # Workers start one after the other, so that the last requests of one may come after the end.
    assert numbers[: len(numbers) // 2] == list(range(len(numbers) // 2))
