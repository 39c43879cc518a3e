"""Requests begin in turns by sender, and how many may be open."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest

from serve_app.base.errors import RateLimitError
from serve_app.server.access import turnstile as turnstile_module
from serve_app.server.access.turnstile import FEW, MOST_PAUSE_S, WINDOW_S, OpenRequests, Turnstile


@dataclass
class Time:
    """Of a loop that is busy for this part of it."""

    now: float = 100.0
    cpu_s: float = 0.0
    busy: float = 0.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        self.cpu_s += self.busy * seconds

    def turnstile(self) -> Turnstile:
        return Turnstile(lambda: self.now, lambda: self.cpu_s)


async def turns(n: int) -> None:
    """So many turns of the loop."""
    for _ in range(n):
        await asyncio.sleep(0)


async def test_one_request_begins_in_each_turn_of_the_loop() -> None:
    turnstile, begun = Time().turnstile(), list[int]()

    async def ask(number: int) -> None:
        await turnstile.turn("a")
        begun.append(number)

    tasks = [asyncio.create_task(ask(number)) for number in range(5)]
    seen = []
    for _ in range(14):
        await turns(1)
        seen.append(len(begun))
    await asyncio.gather(*tasks)
    assert begun == [0, 1, 2, 3, 4]
    assert max(after - before for before, after in itertools.pairwise(seen)) == 1


async def test_senders_take_turns() -> None:
    turnstile, begun = Time().turnstile(), list[str]()

    async def ask(sender: str) -> None:
        await turnstile.turn(sender)
        begun.append(sender)

    tasks = [asyncio.create_task(ask("many")) for _ in range(6)]
    tasks += [asyncio.create_task(ask("few")) for _ in range(2)]
    await asyncio.gather(*tasks)
    assert begun[:4] == ["many", "many", "few", "many"] or begun[:4] == [
        "many",
        "few",
        "many",
        "few",
    ]
    assert Counter(begun) == {"many": 6, "few": 2}


async def test_whoever_leaves_while_waiting_holds_up_nobody() -> None:
    turnstile, begun = Time().turnstile(), list[str]()

    async def ask(sender: str) -> None:
        await turnstile.turn(sender)
        begun.append(sender)

    first, gone, last = (asyncio.create_task(ask(sender)) for sender in ("a", "b", "c"))
    await turns(1)
    gone.cancel()
    await asyncio.gather(first, last)
    assert begun == ["a", "c"]
    with pytest.raises(asyncio.CancelledError):
        await gone


@pytest.fixture(autouse=True)
def _looks_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's clock does not pass as the tests' does."""
    monkeypatch.setattr(turnstile_module, "LOOK_S", 0.0)


async def begins(
    turnstile: Turnstile, time: Time, senders: dict[str, float], seconds: float
) -> Counter[str]:
    """How many requests of each begin, who asks so often a second and waits for none."""
    begun, tasks = Counter[str](), set[asyncio.Task[None]]()

    async def ask(sender: str) -> None:
        await turnstile.turn(sender)
        begun[sender] += 1

    due = dict.fromkeys(senders, time.now)
    end = time.now + seconds
    while time.now < end:
        for sender, rate in senders.items():
            while due[sender] <= time.now:
                due[sender] += 1 / rate
                tasks.add(asyncio.create_task(ask(sender)))
        await turns(6)
        time.pass_(0.004)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return begun


async def test_who_begins_most_is_slowed_down_while_the_loop_is_busy() -> None:
    time = Time(busy=1.0)
    begun = await begins(time.turnstile(), time, {"many": 100, "few": 5}, 4.0)
    assert begun["few"] == pytest.approx(20, abs=1)
    assert begun["many"] <= 4 / MOST_PAUSE_S + 3 * FEW


async def test_nobody_is_slowed_down_while_the_loop_has_time() -> None:
    time = Time(busy=0.4)
    begun = await begins(time.turnstile(), time, {"many": 100, "few": 5}, 4.0)
    assert begun["many"] == pytest.approx(400, rel=0.02)


async def test_nobody_is_slowed_down_who_is_alone() -> None:
    time = Time(busy=1.0)
    begun = await begins(time.turnstile(), time, {"many": 100}, 4.0)
    assert begun["many"] == pytest.approx(400, rel=0.02)


async def test_what_is_long_ago_is_forgotten() -> None:
    time = Time(busy=1.0)
    turnstile = time.turnstile()
    await begins(turnstile, time, {"many": 100, "few": 5}, 2.0)
    assert set(turnstile._senders) == {"many", "few"}
    time.pass_(10 * WINDOW_S)
    await turnstile.turn("few")
    assert set(turnstile._senders) == {"few"}


def fill(requests: OpenRequests, held: ExitStack, client: str) -> int:
    """How many the client gets until it is refused."""
    n = 0
    with suppress(RateLimitError):
        while n <= requests.limit:
            held.enter_context(requests.count(client))
            n += 1
    return n


@pytest.mark.parametrize(
    ("limit", "got"), [(1000, [800, 160, 32]), (10, [8, 2, 0]), (1, [1, 0]), (2, [2, 0])]
)
def test_each_gets_four_fifths_of_what_is_left(limit: int, got: list[int]) -> None:
    requests = OpenRequests(limit)
    with ExitStack() as held:
        assert [fill(requests, held, f"client {i}") for i in range(len(got))] == got
        assert len(requests) == sum(got)
    assert len(requests) == 0


def test_a_newcomer_finds_a_place_until_none_is_left() -> None:
    requests = OpenRequests(8)
    with ExitStack() as held:
        assert fill(requests, held, "greedy") == 7
        for number in range(1):
            held.enter_context(requests.count(f"newcomer {number}"))
        with pytest.raises(RateLimitError, match=r"0 open requests.* 8 of at most 8") as told:
            held.enter_context(requests.count("too late"))
        assert told.value.retry_after_s == 1


def test_who_leaves_makes_room_and_is_forgotten() -> None:
    requests = OpenRequests(4)
    with ExitStack() as held:
        assert fill(requests, held, "a") == 4
    with ExitStack() as held:
        assert fill(requests, held, "b") == 4
    assert not requests._by_client
