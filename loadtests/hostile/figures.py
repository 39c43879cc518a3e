"""Honest users' figures in a part of a run, from their journal. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from loadtests.load.stream_metrics import read_journal
from serve_app.cli.measure.benchmark import percentile
from serve_app.cli.measure.outcomes import COMPLETE, Outcome


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to /health."""

    at_s: float
    """When it was asked, since the epoch."""
    seconds: float
    status: int
    """0 if there was no answer."""


@dataclass(frozen=True, slots=True)
class Journal:
    """The lines written so far."""

    sent: int
    outcomes: Sequence[Outcome]
    probes: Sequence[Probe]


@dataclass(frozen=True, slots=True)
class Seen:
    """Honest users' figures in a stretch of time. Times are in seconds; None where nothing was measured."""

    answers: int
    """Complete ones, of those that were asked for in it."""
    ttft_p95_s: float | None
    itl_p99_s: float | None
    longest_gap_s: float | None
    longest_pause_s: float | None
    """Of /health's answers."""
    failures: tuple[str, ...]
    """Why requests that ran meanwhile are not complete: a line for each."""


def probe_line(at_s: float, seconds: float, status: int) -> str:
    """A question to /health, as a line of a journal."""
    return json.dumps({"probe": [at_s, seconds, status]}) + "\n"


def read(lines: Iterable[str]) -> Journal:
    """The journal. Its last line may be broken: it is being written."""
    whole = [line for line in lines if line.endswith("\n")]
    probes = [Probe(*json.loads(line)["probe"]) for line in whole if line.startswith('{"probe"')]
    sent, outcomes = read_journal(whole)
    return Journal(len(sent), outcomes, probes)


def seen(journal: Journal, begin_s: float, end_s: float, *, and_later: bool = False) -> Seen:
    """The figures between these two moments, since the epoch. A request belongs to the moment that it was
    sent, a gap and a failure to that of their end; `and_later`, failures that ended later, too, if their
    requests were sent before `end_s`."""
    own = [one for one in journal.outcomes if begin_s <= one.start_s < end_s]
    ttft_s = [one.ttft_s for one in own if one.ttft_s is not None]
    gaps_s = [
        gap for one in journal.outcomes for at_s, gap in _gaps(one) if begin_s <= at_s < end_s
    ]
    probes = [one for one in journal.probes if begin_s <= one.at_s < end_s]
    pauses_s = [one.seconds for one in probes]
    failures = [
        f"{one.end}: {one.reason}"
        for one in journal.outcomes
        if one.end != COMPLETE
        and one.start_s < end_s
        and begin_s <= one.start_s + one.wall_s < (inf if and_later else end_s)
    ]
    failures += [f"/health: {one.status or 'no answer'}" for one in probes if one.status != 200]
    return Seen(
        answers=sum(one.end == COMPLETE for one in own),
        ttft_p95_s=percentile(ttft_s, 95) if ttft_s else None,
        itl_p99_s=percentile(gaps_s, 99) if gaps_s else None,
        longest_gap_s=max(gaps_s, default=None),
        longest_pause_s=max(pauses_s, default=None),
        failures=tuple(failures),
    )


def _gaps(one: Outcome) -> Iterator[tuple[float, float]]:
    """When each gap ended, and how long it was."""
    at_s = one.start_s + (one.ttft_s or 0.0)
    for gap in one.gaps_s:
        at_s += gap
        yield at_s, gap
