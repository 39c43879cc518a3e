"""The ends of a load test's requests, and the figures that they add up to. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from loadtests.common.benchmark import percentile
from loadtests.common.streams import Answer

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
    """Of the user who sent it."""
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


def heard(answer: Answer) -> dict[str, Any]:
    """The fields of an Outcome that a stream gives."""
    return {
        "ttft_s": answer.ttft_s,
        "gaps_s": tuple(round(gap, 5) for gap in answer.gaps_s),
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens or 0,
        "cached_tokens": answer.cached_tokens or 0,
    }


@dataclass(frozen=True, slots=True)
class Accounts:
    """Whether every request that was sent ended once. `missing` were sent and never ended; `twice` ended
    again, ended without having been sent, or got an answer that another one got, too."""

    sent: int
    complete: int
    refused: int
    aborted: int
    failed: int
    missing: int
    twice: int

    @property
    def balanced(self) -> bool:
        """sent = complete + refused + aborted + failed, nothing missing, nothing twice."""
        ended = self.complete + self.refused + self.aborted + self.failed
        return self.sent == ended and not self.missing and not self.twice

    def __str__(self) -> str:
        return (
            f"{self.sent} sent = {self.complete} complete + {self.refused} refused + "
            f"{self.aborted} aborted + {self.failed} failed; {self.missing} missing, {self.twice} twice"
        )


def accounts(sent: Sequence[str], outcomes: Sequence[Outcome]) -> Accounts:
    """The books of a run: the ids as they were sent, and all ends."""
    ends = Counter(outcome.end for outcome in outcomes)
    ended = Counter(outcome.id for outcome in outcomes)
    answers = Counter(o.answer_id for o in outcomes if o.answer_id is not None)
    extra = ended - Counter(sent)
    return Accounts(
        sent=len(sent),
        **{end: ends[end] for end in ENDS},
        missing=(Counter(sent) - ended).total(),
        twice=extra.total() + sum(n - 1 for n in answers.values()),
    )


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


def errors(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many requests failed, by the type of the error."""
    return dict(Counter(o.reason for o in outcomes if o.end == FAILED).most_common())


def sent_line(request_id: str) -> str:
    """A request that has been sent, as a line of a journal."""
    return json.dumps({"sent": request_id}) + "\n"


def ended_line(outcome: Outcome) -> str:
    """A request that has ended, as a line of a journal."""
    return json.dumps({"ended": asdict(outcome)}) + "\n"


def read_journal(lines: Iterable[str]) -> tuple[list[str], list[Outcome]]:
    """The ids of all requests that were sent, and the ends. Raises ValueError at a broken line."""
    sent: list[str] = []
    outcomes: list[Outcome] = []
    names = {field.name for field in fields(Outcome)}
    for line in lines:
        entry = json.loads(line)
        if "sent" in entry:
            sent.append(entry["sent"])
        elif "ended" in entry:
            ended = {name: value for name, value in entry["ended"].items() if name in names}
            outcomes.append(Outcome(**ended | {"gaps_s": tuple(ended["gaps_s"])}))
    return sent, outcomes
