"""Load tests of a real server, as their users run them, but short."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtests.common.processes import with_default_signals
from loadtests.load import chaos
from loadtests.load.driver import Load, drive
from loadtests.load.stream_metrics import accounts, read_journal
from loadtests.load.target import Target
from serve_app.cli.measure.outcomes import REFUSED
from tests.e2e.conftest import DEMO_SLOTS, ROOT, Corral, model

DEMO = 2  # its index among the models


@pytest.mark.timeout(180)
def test_locust_headless_measures_streams(corral: Corral, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    locust = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
    how = [
        "-u",
        "6",
        "-r",
        "6",
        "-t",
        "5s",
        "--think",
        "0.2",
        "--model",
        "demo",
        "--shape",
        "steps",
        "--slo-ttft",  # so that answers of a busy machine are good, too
        "60",
        "--slo-itl",
        "60",
    ]
    files = ["--csv", str(tmp_path / "locust"), "--journal", str(journal)]
    done = subprocess.run(
        with_default_signals(*locust, *how, *files, "--host", corral.url),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "locust_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    assert {"TTFT", "ITL", "E2E", "TOKENS/S", "GOOD"} <= {row_type for row_type, _ in rows}
    sent, outcomes = read_journal(journal.read_text().splitlines())
    books = accounts(sent, outcomes)
    assert books.balanced
    assert books.complete
    assert books.failed == 0
    # Locust writes its files every second: the very last may be missing there.
    ttft = int(rows["TTFT", "chat"]["Request Count"])
    itl = int(rows["ITL", "chat"]["Request Count"])
    chats = [o for o in outcomes if o.kind == "chat"]
    assert 0 <= sum(o.ttft_s is not None for o in chats) - ttft <= 6
    assert 0.8 <= itl / sum(len(o.gaps_s) for o in chats) <= 1.0


@pytest.mark.long
def test_an_open_loop_sends_as_many_as_it_should(corral: Corral) -> None:
    load = Load(1, 8, "code=1", model="demo", arrivals_per_s=4.0)
    result = drive(Target(corral.url), load)
    assert result.accounts.balanced
    assert 16 <= result.accounts.sent <= 48  # of 32, four standard deviations to one side
    assert result.idle_after_s is not None


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["overload", pytest.param("vanish", marks=pytest.mark.long)])
def test_the_books_balance(corral: Corral, name: str) -> None:
    load = chaos.load_of(name, capacity=6, seconds=4, model="demo")
    result = chaos.run(Target(corral.url), name, load)
    assert chaos.problems(name, result) == [], chaos.verdict(name, result)
    refused = [o for o in result.outcomes if o.end == REFUSED]
    assert {o.reason for o in refused} <= {"429 queue_full"}
    assert all(slot["state"] == "idle" for slot in corral.stats(DEMO)["slots"])
    # No replica was lost, and those who left want nothing.
    assert "continues on another replica" not in corral.log
    assert "QueueFullError" not in corral.log  # a refusal has no traceback


@pytest.mark.long
@pytest.mark.timeout(180)
def test_slow_readers_cost_their_neighbours_nothing(corral: Corral) -> None:
    load = chaos.load_of("slow", capacity=6, seconds=6, model="demo")
    result = chaos.run(Target(corral.url), "slow", load)
    assert chaos.problems("slow", result) == [], chaos.verdict("slow", result)
    assert {o.kind for o in result.outcomes} == {"chat", "slow"}


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_killed_replica_is_replaced_under_load(
    start: Callable[[list[dict[str, Any]]], Corral],
) -> None:
    server = start([model(None, "demo", n_slots=DEMO_SLOTS, n_ctx_slot=2048)])
    server.wait_ready()
    (before,) = server.pids("ray::ServeReplica:corral:engine-demo")
    load = chaos.load_of("kill", capacity=4, seconds=30, model="demo")
    result = chaos.run(Target(server.url, directory=server.directory), "kill", load)
    assert chaos.problems("kill", result) == [], chaos.verdict("kill", result)
    (after,) = server.pids("ray::ServeReplica:corral:engine-demo")
    assert after != before
