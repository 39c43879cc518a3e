"""The load client itself, in Locust, against a server that does nothing but write events.

What it can read, whether its clock is right, and what it makes of a stream that breaks off.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from loadtests.common.processes import with_default_signals
from loadtests.common.servers import ROOT, free_port
from loadtests.load.stream_metrics import accounts, read_journal
from serve_app.cli.measure.benchmark import percentile
from serve_app.cli.measure.outcomes import FAILED, Outcome

EVENTS = 300
RUN_S = 3


@contextmanager
def rig(*how: object) -> Iterator[str]:
    """A rig's URL."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("sse_rig.py")), str(port)]
    with subprocess.Popen(with_default_signals(*command, *map(str, how))) as process:
        try:
            transport = httpx.HTTPTransport(retries=8)  # until it listens
            with httpx.Client(transport=transport) as http:
                http.get(f"http://127.0.0.1:{port}/v1/models")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def load(url: str, users: int, folder: Path) -> tuple[list[str], list[Outcome], float, float]:
    """What users who never pause get: ids, ends, seconds, and the client's share of a core."""
    journal = folder / "journal"
    locust = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless"]
    how = [
        "-u",
        str(users),
        "-r",
        str(users),
        "-t",
        f"{RUN_S}s",
        "--think",
        "0",
        "--mix",
        "batch=1",
    ]
    subprocess.run(
        with_default_signals(*locust, *how, "--host", url, "--journal", str(journal)),
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,  # 1 if requests failed
    )
    lines = journal.read_text().splitlines()
    client = json.loads(lines[-1])["client"]
    return *read_journal(lines), client["wall_s"], client["cpu_s"] / client["wall_s"]


@pytest.mark.long
def test_the_client_reads_far_more_than_a_cpu_machine_writes(tmp_path: Path) -> None:
    """Every event parsed, timed and counted in Locust's statistics; the rig takes a core of its own."""
    with rig(EVENTS, 0) as url:
        sent, outcomes, wall_s, share = load(url, 20, tmp_path)
    per_s = sum(outcome.tokens for outcome in outcomes) / wall_s
    print(f"{per_s:,.0f} events/s, {share:.0%} of a core")
    assert accounts(sent, outcomes).balanced
    assert per_s > 5_000  # as much as some hundred streams; 69,000 on an idle machine


@pytest.mark.long
def test_gaps_are_as_they_were_written(tmp_path: Path) -> None:
    """40 users, an event each every 20 ms: 2,000 events/s, none of which waits for the client. Single gaps
    are longer where something else computes."""
    with rig(EVENTS, 20) as url:
        _, outcomes, _, share = load(url, 40, tmp_path)
    gaps_ms = [1000 * gap for outcome in outcomes for gap in outcome.gaps_s]
    p50, p95 = percentile(gaps_ms, 50), percentile(gaps_ms, 95)
    print(f"p50 {p50:.2f} ms, p95 {p95:.2f} ms, {share:.0%}")
    assert p50 == pytest.approx(20, abs=10)
    assert share < 0.9


def test_a_stream_that_breaks_off_is_a_failure_with_what_came(tmp_path: Path) -> None:
    with rig(EVENTS, 50, 5) as url:
        sent, outcomes, _, _ = load(url, 2, tmp_path)
    books = accounts(sent, outcomes)
    assert books.balanced
    assert books.complete == 0
    failed = [outcome for outcome in outcomes if outcome.end == FAILED]
    assert failed
    assert {(outcome.reason, outcome.tokens) for outcome in failed} == {("HTTPParseError", 5)}
