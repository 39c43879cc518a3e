"""Budgets of API keys: what each may use in a time, in the ledger's file, for all ingresses together."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

DAY_S = 86400
LEASE_S = 10.0
"""The requests of an ingress that is gone count as running for so long."""


class Period(NamedTuple):
    """A time that a budget is for. Amounts are kept by slots of it."""

    name: str
    """The budget's name in messages."""
    slot: Callable[[float], int]
    """The slot of a time."""
    n_slots: int
    """The slots that count: the present one and those before it."""
    ends: Callable[[int], float]
    """The time from which a slot's amounts count no more."""


def _month(now: float) -> int:
    moment = time.gmtime(now)
    return 12 * moment.tm_year + moment.tm_mon - 1


def _month_ends(slot: int) -> float:
    year, month = divmod(slot + 1, 12)
    return datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


MINUTE = Period("tokens per minute", int, 60, lambda slot: slot + 60)
DAY = Period("tokens per day", lambda now: int(now // DAY_S), 1, lambda slot: (slot + 1) * DAY_S)
MONTH = Period("cost per month", _month, 1, _month_ends)
PERIODS = (MINUTE, DAY, MONTH)


class Claim(NamedTuple):
    """An amount that a request needs of a budget."""

    period: Period
    limit: float
    amount: float


class Refusal(NamedTuple):
    """The budget that does not have the amount, and the time after which it does."""

    claim: Claim
    wait_s: int


def reserve(
    db: sqlite3.Connection, key: str, claims: Sequence[Claim], now: float
) -> Refusal | dict[str, float]:
    """Take all amounts, or nothing. Returns what is left of each budget, by its period's name. A request
    that needs more than a whole budget needs all of it."""
    left = {}
    for claim in claims:
        period, limit = claim.period, claim.limit
        slot = period.slot(now)
        rows = db.execute(
            "SELECT slot, amount FROM spent WHERE key = ? AND period = ? AND slot BETWEEN ? AND ? "
            "ORDER BY slot",
            (key, period.name, slot - period.n_slots + 1, slot + period.n_slots),
        ).fetchall()
        spent = math.fsum(amount for _, amount in rows)
        missing = spent + min(claim.amount, limit) - limit
        if missing > 0 or spent >= limit:
            for at, amount in rows:
                missing -= amount
                if missing <= 0 and amount > 0:
                    return Refusal(claim, max(1, math.ceil(period.ends(at) - now)))
            return Refusal(claim, max(1, math.ceil(period.ends(slot) - now)))
        left[period.name] = limit - spent - claim.amount
    for claim in claims:
        add(db, {(key, claim.period.name, claim.period.slot(now)): claim.amount})
    return left


def others_running(db: sqlite3.Connection, key: str, holder: int, now: float) -> int:
    """The requests of a key that run at other ingresses, which have renewed their leases. A lease of before
    the clock was set back counts no more."""
    query = "SELECT TOTAL(n) FROM running WHERE key = ? AND holder != ? AND until BETWEEN ? AND ?"
    n: float = db.execute(query, (key, holder, now, now + 2 * LEASE_S)).fetchone()[0]
    return int(n)


def add(db: sqlite3.Connection, amounts: Mapping[tuple[str, str, int], float]) -> None:
    """Add to what keys have spent in slots of periods. Negative amounts give back."""
    db.executemany(
        "INSERT INTO spent VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
        [(*row, amount) for row, amount in amounts.items() if amount],
    )


def forget(db: sqlite3.Connection, now: float) -> None:
    """Remove the amounts that count no more."""
    for period in PERIODS:
        before = period.slot(now) - 2 * period.n_slots
        db.execute("DELETE FROM spent WHERE period = ? AND slot < ?", (period.name, before))
    db.execute("DELETE FROM running WHERE until NOT BETWEEN ? AND ?", (now, now + 2 * LEASE_S))
