"""Measures what batches take longer in a paged cache, the more tokens a sequence has."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.deep_profiler import Depth
from serve_app.engine.autotune.profiler import ProfiledContext
from serve_app.engine.autotune.trials import Trials

# Rows of a prompt's chunk, the most telling ones first.
_CHUNKS = (16, 64)


class PagedTrialContext(ProfiledContext, Protocol):
    """The further method needed of a context with a paged cache."""

    def pretend(self, seq_id: int, n_tokens: int) -> None:
        """Give an empty sequence so many tokens, without computing them. Raises CacheFullError."""


def measure_depth(
    context: PagedTrialContext,
    profile: Profile,
    n_tokens: int,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Depth:
    """Measure what so many tokens before a batch add to it, in about `limit_s`. The first sequence has
    them. It has room for a chunk more, and is empty before and after. Decoder thread only."""
    trials = Trials(clock)
    trials.left_s = limit_s

    def added(shallow: Mapping[int, float], sizes: Sequence[int]) -> dict[int, float]:
        times: dict[int, float] = {}
        for _ in trials.measure(times, [n for n in sizes if n in shallow], trial):
            pass
        return {n: max(0.0, seconds - shallow[n]) for n, seconds in times.items()}

    def trial(n_rows: int) -> float:
        end = n_tokens + n_rows
        rows = [(0, i, 0, i == end - 1) for i in range(n_tokens, end)]
        seconds = trials.timed(lambda: context.decode(rows))
        context.truncate(0, n_tokens)
        return seconds

    context.pretend(0, n_tokens)
    try:
        decode_s = added(profile.decode_s, (1,))
        prefill_s = added(profile.prefill_s, _CHUNKS)
    finally:
        context.truncate(0, 0)
    return Depth(n_tokens if decode_s else 0, decode_s, prefill_s)
