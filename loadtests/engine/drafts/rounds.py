"""One round of `loadtests.engine.drafts`, in the process that has the engine.

Not in `__main__`, which spawned processes do not import.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from serve_app.cli.measure import process
from serve_app.engine import Engine, GenerationRequest, SamplingParams

TIMEOUT_S = 400


@dataclass(frozen=True, slots=True)
class Round:
    """One engine's round."""

    tokens_per_s: float
    """Generated, while all streams decode."""
    proposed: int
    right: int
    draft_part: float
    """Of the steps' time, what the draft model's passes took."""


def run_round(n_streams: int, n_prompt: int, n_tokens: int, temperature: float) -> Round:
    """Over there: all streams at once."""
    engine: Engine = process.opened_object()
    before = engine.stats()
    requests = [
        GenerationRequest(
            f"{time.monotonic()}-{i}",
            _prompt(i, n_prompt),
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=n_tokens, ignore_eos=True, top_k=0
            ),
        )
        for i in range(n_streams)
    ]
    arrivals = process.all_arrivals(engine, requests, TIMEOUT_S)
    after = engine.stats()
    begin, end = max(times[0] for times in arrivals), max(times[-1] for times in arrivals)
    n_decoded = sum(sum(t > begin for t in times) for times in arrivals)
    then, now = before.speculation, after.speculation
    return Round(
        n_decoded / (end - begin),
        now.drafted_tokens - then.drafted_tokens,
        now.accepted_tokens - then.accepted_tokens,
        (now.draft_s - then.draft_s) / (after.timing.step_s - before.timing.step_s),
    )


def _prompt(i: int, n_tokens: int) -> tuple[int, ...]:
    """Others in each stream, and the same in each round."""
    return tuple(20 + (7 * i + 3 * n) % 200 for n in range(n_tokens))
