"""The journal of a load test's requests, and the books of their ends. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from serve_app.cli.measure.outcomes import ENDS, FAILED, Outcome


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
