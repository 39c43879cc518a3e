"""The journal of a load test's requests, the books of their ends, and what users got. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from serve_app.cli.measure.benchmark import percentile
from serve_app.cli.measure.outcomes import ABORTED, COMPLETE, ENDS, FAILED, Outcome
from serve_app.cli.measure.outcomes import figures as common_figures


@dataclass(frozen=True, slots=True)
class Slo:
    """The times that a user should get, in seconds."""

    ttft_s: float
    itl_s: float
    """The mean time of a token after the first, of one answer."""


def token_s(outcome: Outcome) -> float | None:
    """Mean seconds of a token after the first; None of an answer with fewer than two."""
    return sum(outcome.gaps_s) / (outcome.tokens - 1) if outcome.tokens > 1 else None


def meets(outcome: Outcome, slo: Slo) -> bool:
    """Whether an answer is complete and came as fast as it should."""
    in_time = outcome.ttft_s is None or outcome.ttft_s <= slo.ttft_s
    return outcome.end == COMPLETE and in_time and (token_s(outcome) or 0.0) <= slo.itl_s


def figures(outcomes: Sequence[Outcome], wall_s: float, slo: Slo) -> dict[str, float | None]:
    """The users' figures in `wall_s` seconds; None where nothing was measured. A goodput counts complete
    answers that meet the SLO, `good_share` their share of all requests that users did not leave."""
    good = sum(meets(outcome, slo) for outcome in outcomes)
    stayed = sum(outcome.end != ABORTED for outcome in outcomes)
    done = [outcome for outcome in outcomes if outcome.end == COMPLETE]
    tokens_s = [seconds for outcome in done if (seconds := token_s(outcome))]
    return {
        "requests_per_s": len(done) / wall_s,
        "goodput_per_s": good / wall_s,
        "good_share": good / stayed if stayed else None,
        **common_figures(outcomes, wall_s),
        "user_tokens_per_s_p50": 1 / percentile(tokens_s, 50) if tokens_s else None,
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
