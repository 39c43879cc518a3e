"""Accounts of API keys: running requests and budgets, at one ingress and at several."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.errors import KeyLimitError, NoRoomError, PermissionDeniedError, RateLimitError
from serve_app.base.values.requests import Deadline
from serve_app.config.keys import ApiKey
from serve_app.server.http.request_context import RETRY_S, Caller
from serve_app.server.usage import ledger as ledgers
from serve_app.server.usage.accounts import FORGIVEN_S, KeyAccount, Reservation
from serve_app.server.usage.budgets import DAY_S, MONTH
from serve_app.server.usage.ledger import Ledger


class Clock:
    """Both the time of day and the monotonic one."""

    def __init__(self) -> None:
        self.now = 20_000.0 * DAY_S

    def __call__(self) -> float:
        return self.now


def account(
    clock: Clock | None = None, folder: Path | None = None, name: str = "ana", **limits: Any
) -> KeyAccount:
    clock = clock or Clock()
    key = ApiKey.model_validate({"name": name, "key": "a" * 16, **limits})
    return KeyAccount(key, Ledger(folder, clock), clock)


async def reserve(
    own: KeyAccount, n_prompt: int, n_answer: int = 0, *, background: bool = False
) -> Reservation:
    return await own.reserve(n_prompt, 1, n_answer, background=background)


async def refused(own: KeyAccount, n_prompt: int, n_answer: int = 0) -> int:
    """The seconds that the key is told to wait."""
    with pytest.raises(RateLimitError, match="has used up its") as error:
        await reserve(own, n_prompt, n_answer)
    assert error.value.retry_after_s is not None
    return error.value.retry_after_s


async def test_requests_at_once() -> None:
    own = account(max_concurrent_requests=2)
    await own.enter()
    await own.enter()
    with pytest.raises(RateLimitError, match="2 requests at once") as error:
        await own.enter()
    assert error.value.retry_after_s == 1
    own.leave()
    await own.enter()


async def test_requests_at_once_are_those_of_all_ingresses(tmp_path: Path) -> None:
    clock = Clock()
    here, there = (account(clock, tmp_path, max_concurrent_requests=4) for _ in range(2))
    for own in (here, here, there):
        await own.enter()
    results = await asyncio.gather(*(own.enter() for own in (here, there)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["NoneType", "RateLimitError"]
    for own in (here, there):
        with pytest.raises(RateLimitError, match="4 are running"):
            await own.enter()
    here.leave()
    await there.enter()


@pytest.mark.parametrize("elapsed_s", [11, -3600])
async def test_requests_of_an_ingress_that_is_gone_run_no_more(
    tmp_path: Path, elapsed_s: float
) -> None:
    """Also if the clock is set back."""
    clock = Clock()
    here, there = (account(clock, tmp_path, max_concurrent_requests=1) for _ in range(2))
    await here.enter()
    with pytest.raises(RateLimitError):
        await there.enter()
    clock.now += elapsed_s
    await there.enter()


async def test_tokens_count_for_a_minute() -> None:
    clock = Clock()
    own = account(clock, tokens_per_minute=60)
    await reserve(own, 40)
    clock.now += 10
    assert await refused(own, 30) == 50
    first = await reserve(own, 10)
    first.charge(20)  # more than there are
    first.settle()
    assert await refused(own, 1) == 50
    clock.now += 49.5
    assert await refused(own, 1) == 1
    clock.now += 0.5
    await reserve(own, 30)
    assert await refused(own, 1) == 10


async def test_an_answer_is_reserved_and_what_it_does_not_need_is_free_again() -> None:
    own = account(tokens_per_minute=100)
    reservation = await reserve(own, 10, 50)
    await refused(own, 10, 50)
    reservation.charge(20)
    await refused(own, 10, 50)
    reservation.settle()
    reservation.settle()
    await reserve(own, 10, 50)  # which is taken to need 20
    await refused(own, 41)
    await reserve(own, 40)


async def test_an_answer_without_a_bound_is_taken_to_be_as_long_as_others_before() -> None:
    own = account(tokens_per_minute=10_000)
    for _ in range(80):
        reservation = await own.reserve(0, 1, None, background=False)
        reservation.charge(16)
        reservation.settle()
    assert (
        await own.ledger.call(lambda db: db.execute("SELECT SUM(amount) FROM spent").fetchone()[0])
        == 80 * 16
    )
    await reserve(own, 10_000 - 80 * 16 - 20)
    await own.reserve(0, 1, None, background=False)
    assert await refused(own, 5)


async def test_what_was_refused_costs_nothing() -> None:
    own = account(tokens_per_minute=60)
    reservation = await reserve(own, 40, 20)
    reservation.give_back()
    await reserve(own, 60)


async def test_a_prompt_of_more_than_a_whole_budget_needs_all_of_it() -> None:
    clock = Clock()
    own = account(clock, tokens_per_minute=60)
    await reserve(own, 600)
    clock.now += 59
    assert await refused(own, 600) == 1
    clock.now += 1
    await reserve(own, 600)


async def test_budgets_of_a_day_end_with_it() -> None:
    clock = Clock()
    own = account(clock, tokens_per_day=100)
    clock.now += DAY_S - 10
    await reserve(own, 100)
    assert await refused(own, 1) == 10
    clock.now += 10
    await reserve(own, 100)


async def test_costs_end_with_the_month() -> None:
    clock = Clock()
    clock.now = datetime(2028, 2, 28, 12, tzinfo=UTC).timestamp()
    own = account(clock, cost_per_month=1.5)
    own.charge_cost(1.0)
    await reserve(own, 10**6)
    own.charge_cost(0.5)
    assert await refused(own, 1) == 1.5 * DAY_S  # a leap year's February
    clock.now += 1.5 * DAY_S
    await reserve(own, 1)


@pytest.mark.parametrize("year", [1999, 2000, 2026, 2028, 2100])
def test_months_end_where_the_next_begins(year: int) -> None:
    for month in range(1, 13):
        first = datetime(year, month, 1, tzinfo=UTC).timestamp()
        assert MONTH.ends(MONTH.slot(first) - 1) == first
        assert MONTH.slot(first) == MONTH.slot(first - 1) + 1


async def test_budgets_of_minutes_are_not_for_the_background() -> None:
    own = account(tokens_per_minute=10, tokens_per_day=50)
    await reserve(own, 30, background=True)
    await reserve(own, 10)
    assert await refused(own, 10)
    with pytest.raises(RateLimitError, match="50 tokens per day"):
        await reserve(own, 20, background=True)


async def test_a_clock_that_is_set_back_stops_nobody_for_long() -> None:
    clock = Clock()
    own = account(clock, tokens_per_minute=60)
    await reserve(own, 60)
    clock.now -= 3600
    await reserve(own, 60)
    clock.now += 3600
    assert await refused(own, 60) <= 60


async def test_two_ingresses_hold_a_budget_together(tmp_path: Path) -> None:
    """200 clients, whose answers have 20 to 64 tokens and take some seconds, for five minutes."""
    clock, chance, limit = Clock(), random.Random(5), 10_000
    ingresses = [account(clock, tmp_path, tokens_per_minute=limit) for _ in range(2)]
    free_at = [0.0] * 200
    running: list[tuple[float, int, Reservation]] = []
    used: list[int] = []
    for _ in range(300):
        clock.now += 1
        n_tokens = 0
        for end in [entry for entry in running if entry[0] <= clock.now]:
            running.remove(end)
            end[2].charge(end[1])
            end[2].settle()
            n_tokens += end[1]
        for client, at in enumerate(free_at):
            if at > clock.now:
                continue
            try:
                reservation = await reserve(ingresses[client % 2], 20, 64)
            except RateLimitError as error:
                free_at[client] = clock.now + (error.retry_after_s or 0)
                continue
            n_tokens += 20
            free_at[client] = clock.now + chance.randint(1, 5)
            running.append((free_at[client], chance.randint(20, 64), reservation))
        used.append(n_tokens)
    windows = [sum(used[i : i + 60]) for i in range(60, len(used) - 60)]
    assert max(windows) <= 1.02 * limit
    assert sum(used[60:]) / 4 >= 0.98 * limit


async def test_without_its_file_an_ingress_goes_on_with_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "_PAUSE_S", 0.01)
    own = account(folder=tmp_path, tokens_per_minute=100)
    await reserve(own, 40)
    await own.ledger.close()
    broken = Ledger(tmp_path / "other", own.ledger.clock)
    (tmp_path / "other" / "ledger.sqlite").unlink()
    (tmp_path / "other" / "ledger.sqlite").mkdir()
    own.ledger = broken
    await reserve(own, 40)
    with pytest.raises(RateLimitError, match="cannot be read") as error:
        await reserve(own, 40)
    assert error.value.retry_after_s == 5
    (tmp_path / "other" / "ledger.sqlite").rmdir()
    assert await refused(own, 61)  # what was used meanwhile counts
    await broken.close()


async def test_who_leaves_while_budgets_are_asked_gets_all_back() -> None:
    own = account(tokens_per_day=100)
    leaving = asyncio.create_task(reserve(own, 60, 40))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await own.ledger.call(lambda _: None)
    await asyncio.sleep(0)
    await reserve(own, 60, 40)


async def test_without_limits_nothing_is_refused() -> None:
    own = account()
    for _ in range(100):
        await own.enter()
        (await reserve(own, 10**6)).charge(10**6)


def caller(**limits: Any) -> Caller:
    return Caller(account=account(**limits))


async def test_the_largest_prompt() -> None:
    own = caller(max_prompt_tokens=10)
    await own.admit([(1,) * 10])
    with pytest.raises(KeyLimitError, match=r"11 prompt tokens.*allows 10"):
        await own.admit([(1,) * 11])


async def test_each_answer_counts_as_a_request() -> None:
    own = caller(max_concurrent_requests=4)
    async with own.running():
        await own.ask_for(3)
        other = Caller(account=own.account)
        async with other.running():
            with pytest.raises(RateLimitError, match="4 are running"):
                await other.ask_for(2)
        with pytest.raises(KeyLimitError, match="This API key allows 4"):
            await own.ask_for(5)
    assert own.account is not None
    await own.account.enter(4)


@pytest.mark.parametrize(
    ("longest", "n_prompt", "asked", "most"),
    [
        (None, 50, None, None),
        (None, 50, 5, 5),
        (60, 50, None, 10),
        (60, 50, 5, 5),
        (60, 50, 99, 10),
    ],
)
def test_the_longest_context(
    longest: int | None, n_prompt: int, asked: int | None, most: int | None
) -> None:
    limits = {} if longest is None else {"max_context_tokens": longest}
    assert caller(**limits).most_new(n_prompt, asked) == most
    with pytest.raises(KeyLimitError, match="allows 50, with the answer"):
        caller(max_context_tokens=50).most_new(50, 1)


@pytest.mark.parametrize(
    ("models", "name", "may"),
    [
        (None, "m", True),
        (["m"], "m", True),
        (["m"], "n", False),
        (["qwen*"], "qwen3-4b", True),
        (["qwen*"], "m", False),
        ([], "m", False),
    ],
)
def test_models_that_a_key_may_use(models: list[str] | None, name: str, may: bool) -> None:
    own = caller(models=models)
    if may:
        own.check_model(name)
        return
    with pytest.raises(PermissionDeniedError, match="may not use"):
        own.check_model(name)


async def test_a_key_may_go_on_in_the_background() -> None:
    own = caller(tokens_per_minute=10, tokens_per_day=100, over_budget="background")
    in_background = []
    for _ in range(2):
        await own.admit([(1,) * 10])
        in_background.append(own.is_background)
    assert in_background == [False, True]
    own.charge(5)
    assert isinstance(own.account, KeyAccount)
    assert await refused(own.account, 1)
    with pytest.raises(RateLimitError, match="100 tokens per day"):  # all of it counts there
        await reserve(own.account, 76, background=True)
    await reserve(own.account, 75, background=True)


async def test_a_request_with_a_deadline_does_not_go_on_in_the_background() -> None:
    own = caller(tokens_per_minute=10, over_budget="background")
    await own.admit([(1,) * 10])
    own.answer_by = Deadline(end_s=1e9)
    with pytest.raises(RateLimitError, match="10 tokens per minute"):
        await own.admit([(1,) * 10])
    assert not own.is_background


async def test_who_was_refused_is_refused_at_once_until_it_has_waited() -> None:
    clock = Clock()
    ana, ben = account(clock), account(clock)
    await ana.enter()
    ana.on_refusal()
    with pytest.raises(NoRoomError) as error:
        await ana.enter()
    assert error.value.retry_after_s == RETRY_S
    await ana.enter(31, besides=1)  # one that is in already
    await ben.enter()
    clock.now += RETRY_S
    await ana.enter()


async def test_after_a_refusal_one_at_a_time_tries_until_one_is_served() -> None:
    clock = Clock()
    ana = account(clock)
    ana.on_refusal()
    for _ in range(3):
        clock.now += RETRY_S
        await ana.enter()
        with pytest.raises(NoRoomError):
            await ana.enter()
    ana.on_success()
    await ana.enter()
    await ana.enter()


async def test_who_stays_away_for_some_seconds_may_come_with_several() -> None:
    clock = Clock()
    ana = account(clock)
    ana.on_refusal()
    clock.now += RETRY_S + FORGIVEN_S
    await ana.enter()
    await ana.enter()
