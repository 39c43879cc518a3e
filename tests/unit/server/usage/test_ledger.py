"""The ledger of usage: what is counted is kept, by minute, hour and day."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from serve_app.base.errors import LedgerError, ObjectNotFoundError
from serve_app.server.http.request_context import UsageCounts
from serve_app.server.usage import ledger as ledgers
from serve_app.server.usage.budgets import DAY_S
from serve_app.server.usage.ledger import HOUR_S, MINUTE_S, Ledger

NOON = 20_000 * DAY_S + 12 * HOUR_S


class Clock:
    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def count(ledger: Ledger, model: str = "m", **counts: Any) -> None:
    ledger.counter("", "/v1/completions")(model, cast(UsageCounts, counts))


async def sums(ledger: Ledger, name: str, width: int = MINUTE_S) -> dict[int, float]:
    """A count by the beginnings of buckets."""
    rows = await ledger.usage(0, 2**40, width)
    return {row["bucket"]: row[name] for row in rows if row[name]}


@pytest.mark.parametrize("is_on_disk", [True, False])
async def test_counts_add_up_by_minute(tmp_path: Path, is_on_disk: bool) -> None:
    clock = Clock()
    ledger = Ledger(tmp_path / "usage" if is_on_disk else None, clock)
    count(ledger, requests=1, prompt_tokens=5)
    count(ledger, completion_tokens=2)
    clock.now += 59
    count(ledger, requests=1, prompt_tokens=7)
    clock.now += 1
    count(ledger, completion_tokens=3)
    assert await sums(ledger, "prompt_tokens") == {NOON: 12}
    assert await sums(ledger, "completion_tokens") == {NOON: 2, NOON + 60: 3}
    assert await sums(ledger, "requests", DAY_S) == {20_000 * DAY_S: 2}
    await ledger.close()


async def test_the_folder_and_its_file_are_private(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "usage")
    count(ledger, requests=1)
    await ledger.close()
    assert (tmp_path / "usage").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "usage" / "ledger.sqlite").stat().st_mode & 0o777 == 0o600


async def test_a_closed_ledger_takes_nothing_and_is_closed_again() -> None:
    ledger = Ledger()
    ledger.runs("ana", 1)
    await ledger.close()
    count(ledger, requests=1)
    ledger.runs("ana", 0)
    with pytest.raises(LedgerError):
        await ledger.call(lambda _: None)
    async with asyncio.timeout(10):
        await ledger.close()


async def test_several_ledgers_share_a_file(tmp_path: Path) -> None:
    both = [Ledger(tmp_path, Clock()) for _ in range(2)]
    for _ in range(50):
        for ledger in both:
            count(ledger, requests=1)
            await ledger.call(lambda _: None)
    assert await sums(both[0], "requests") == {NOON: 100}
    for ledger in both:
        await ledger.close()


async def test_old_rows_get_wider_and_none_is_lost() -> None:
    clock = Clock()
    ledger = Ledger(None, clock)
    for _ in range(100):
        count(ledger, "m", completion_tokens=1)
        count(ledger, "n", completion_tokens=1)
        clock.now += DAY_S + 61
        await ledger.call(lambda _: None)

    def widths(db: sqlite3.Connection) -> dict[int, int]:
        return dict(db.execute("SELECT width, COUNT(*) FROM usage GROUP BY width").fetchall())

    assert sum((await sums(ledger, "completion_tokens")).values()) == 200
    assert await ledger.call(widths) == {MINUTE_S: 2 * 2, HOUR_S: 2 * 58, DAY_S: 2 * 40}


async def test_rows_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MOST_ROWS", 10)
    clock = Clock()
    ledger = Ledger(None, clock)
    for day in range(30):
        count(ledger, "m", completion_tokens=day)
        clock.now += DAY_S
        await ledger.call(lambda _: None)
    by_day = await sums(ledger, "completion_tokens")
    assert list(by_day.values()) == list(range(19, 30))


@pytest.mark.parametrize("damage", ["no file", "no database"])
async def test_a_disk_that_fails_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    monkeypatch.setattr(ledgers, "_PAUSE_S", 0.01)
    monkeypatch.setattr(ledgers, "FLUSH_S", 0.01)
    ledger = Ledger(tmp_path, Clock())
    file = tmp_path / "ledger.sqlite"
    file.unlink()
    if damage == "no file":
        file.mkdir()
    else:
        file.write_bytes(bytes(range(256)) * 100)
    count(ledger, requests=1)
    while not caplog.records:  # noqa: ASYNC110  # nobody calls: what failed is tried again by itself
        await asyncio.sleep(0)
    for _ in range(3):
        with pytest.raises(LedgerError):
            await ledger.usage(0, 2**40, MINUTE_S)
    count(ledger, requests=2)
    file.rename(tmp_path / "damaged")
    assert await sums(ledger, "requests") == {NOON: 3}
    assert file.stat().st_mode & 0o777 == 0o600
    assert caplog.text.count("cannot be used now") == 1
    await ledger.close()


@pytest.mark.parametrize("moved", ["all", "the database"])
async def test_a_file_that_is_moved_away_while_serving_is_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, moved: str
) -> None:
    """Two ingresses share it. One that closes must not remove what the other one has begun."""
    one, other = Ledger(tmp_path / "usage", Clock()), Ledger(tmp_path / "usage", Clock())
    for ledger in (one, other):
        count(ledger, requests=1)
        assert await sums(ledger, "requests")
    away = tmp_path / "away"
    away.mkdir()
    for file in (tmp_path / "usage").glob("ledger.sqlite*" if moved == "all" else "ledger.sqlite"):
        file.rename(away / file.name)
    count(one, requests=3)
    assert await sums(one, "requests") == {NOON: 3}
    count(other, requests=4)
    await other.close()
    assert await sums(one, "requests") == {NOON: 7}
    count(one, requests=2)
    await one.close()
    del one, other
    gc.collect()
    again = Ledger(tmp_path / "usage", Clock())
    assert await sums(again, "requests") == {NOON: 9}
    await again.close()
    assert caplog.text.count("was moved away: a new one begins") == 2
    assert (tmp_path / "usage" / "ledger.sqlite").stat().st_mode & 0o777 == 0o600
    if moved == "all":
        before = Ledger(away, Clock())
        assert await sums(before, "requests") == {NOON: 2}
        await before.close()


async def test_a_file_that_others_could_read_is_private_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").touch(0o644)
    ledger = Ledger(tmp_path)
    count(ledger, requests=1)
    assert await sums(ledger, "requests")
    files = await asyncio.to_thread(lambda: list(tmp_path.iterdir()))
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    await ledger.close()


async def test_rows_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MOST_WAITING_ROWS", 5)
    ledger = Ledger(None, Clock())
    for i in range(100):
        count(ledger, f"m{i % 20}", requests=1)
    assert sum((await sums(ledger, "requests")).values()) == 25


async def test_a_call_that_refuses_changes_nothing_and_others_go_on() -> None:
    ledger = Ledger(None, Clock())

    def refuse(db: sqlite3.Connection) -> None:
        raise ObjectNotFoundError("no")

    results = await asyncio.gather(
        ledger.call(refuse), ledger.call(lambda _: 5), return_exceptions=True
    )
    assert isinstance(results[0], ObjectNotFoundError)
    assert results[1] == 5


def test_the_event_loop_of_servers_is_another_one() -> None:
    """Calls come between counts and leases, whose timers are later."""

    async def use() -> float:
        ledger = Ledger(None, Clock())
        for _ in range(20):
            ledger.runs("ana", 1)
            count(ledger, requests=1)
            await asyncio.gather(*(ledger.call(lambda _: None) for _ in range(3)))
        ((_, n),) = (await sums(ledger, "requests")).items()
        return n

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(use()) == 20


KILLED = """
import asyncio, sys
from pathlib import Path
from serve_app.server.usage.ledger import Ledger

async def main():
    count = Ledger(Path(sys.argv[1])).counter("", "/v1/completions")
    for n in range(10**6):
        count("m", {"completion_tokens": 1})
        print(n + 1, flush=True)
        await asyncio.sleep(0.001)

asyncio.run(main())
"""


def test_a_process_that_is_killed_loses_no_more_than_a_second(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    counted = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            counted = int(line)
            if counted == 1000:
                process.kill()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        (kept,) = db.execute("SELECT SUM(completion_tokens) FROM usage").fetchone()
    assert counted - 1000 < kept <= counted
    assert kept > 0
