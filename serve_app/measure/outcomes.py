"""How the requests of a load ended, and the figures that they add up to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.measure.benchmark import percentile
from serve_app.measure.streams import StreamedAnswer

COMPLETE, REFUSED, ABORTED, FAILED = "complete", "refused", "aborted", "failed"
ENDS = (COMPLETE, REFUSED, ABORTED, FAILED)


@dataclass(frozen=True, slots=True)
class Slo:
    """The times that a user should get, in seconds."""

    ttft_s: float
    itl_s: float
    """The mean time of a token after the first, of one answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. Times are in seconds."""

    id: str
    kind: str
    """The kind of the user who sent it."""
    start_s: float
    """When it was sent, or, of an open loop, should have been: since the epoch."""
    wall_s: float
    """From there to its end."""
    end: str
    """One of ENDS: answered in full; refused with 429; left by its user; anything else."""
    reason: str
    """The type of an error, or who left; empty if complete."""
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    """Between events with text; several that came in one read have gaps of 0."""
    tokens: int = 0
    """Generated: as the server counts them, or, of an answer that is not complete, its events."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_id: str | None = None

    @property
    def token_s(self) -> float | None:
        """Mean seconds of a token after the first; None of an answer with fewer than two."""
        return sum(self.gaps_s) / (self.tokens - 1) if self.tokens > 1 else None

    def meets(self, slo: Slo) -> bool:
        """Whether it is complete and came as fast as it should."""
        in_time = self.ttft_s is None or self.ttft_s <= slo.ttft_s
        return self.end == COMPLETE and in_time and (self.token_s or 0.0) <= slo.itl_s


def heard(answer: StreamedAnswer) -> dict[str, Any]:
    """The fields of an Outcome that a stream gives."""
    return {
        "ttft_s": answer.ttft_s,
        "gaps_s": tuple(round(gap, 5) for gap in answer.gaps_s),
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens or 0,
        "cached_tokens": answer.cached_tokens or 0,
    }


def figures(outcomes: Sequence[Outcome], wall_s: float, slo: Slo) -> dict[str, float | None]:
    """The users' figures in `wall_s` seconds; None where nothing was measured. A goodput counts the
    complete answers that meet the SLO, `good_share` their share of all requests that their users
    did not leave."""
    good = sum(outcome.meets(slo) for outcome in outcomes)
    stayed = sum(outcome.end != ABORTED for outcome in outcomes)
    done = [o for o in outcomes if o.end == COMPLETE]
    ttft_s = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    gaps_s = [gap for o in outcomes for gap in o.gaps_s]
    token_s = [o.token_s for o in done if o.token_s]
    return {
        "tokens_per_s": sum(o.tokens for o in outcomes) / wall_s,
        "requests_per_s": len(done) / wall_s,
        "goodput_per_s": good / wall_s,
        "good_share": good / stayed if stayed else None,
        **_percentiles("ttft", "s", ttft_s, 1),
        **_percentiles("itl", "ms", gaps_s, 1000),
        **_percentiles("e2e", "s", [o.wall_s for o in done], 1),
        "user_tokens_per_s_p50": 1 / percentile(token_s, 50) if token_s else None,
    }


def _percentiles(
    name: str, unit: str, values: Sequence[float], factor: float
) -> dict[str, float | None]:
    return {
        f"{name}_p{percent}_{unit}": factor * percentile(values, percent) if values else None
        for percent in (50, 95, 99)
    }
