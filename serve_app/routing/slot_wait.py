"""Forecasts how long it takes until a slot is free, for engines and routers. Pure."""

from __future__ import annotations


def slot_wait_s(work_s: float, n_live: int, n_slots: int) -> float:
    """Seconds that the next request waits for a slot behind `n_live` others, which take `work_s` until all
    have ended: they end one by one."""
    n_before = n_live - n_slots + 1
    return work_s * n_before / n_live if n_before > 0 else 0.0
