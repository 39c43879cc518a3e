"""What honest users saw in a stretch of time, from journals made by hand."""

from __future__ import annotations

import pytest

from loadtests.hostile.figures import Journal, probe_line, read, seen
from loadtests.load.stream_metrics import ended_line, sent_line
from serve_app.cli.measure.outcomes import ABORTED, COMPLETE, REFUSED, Outcome


def outcome(
    start_s: float, ttft_s: float | None = 0.1, gaps_s: tuple[float, ...] = (), end: str = COMPLETE
) -> Outcome:
    wall_s = (ttft_s or 0.0) + sum(gaps_s)
    return Outcome(str(start_s), "honest-0", start_s, wall_s, end, "", ttft_s, gaps_s)


def journal(*outcomes: Outcome) -> Journal:
    return Journal(len(outcomes), outcomes, ())


def test_a_request_belongs_to_when_it_was_sent() -> None:
    made = journal(outcome(9.9, 5.0), outcome(10.0, 0.2), outcome(19.9, 0.4), outcome(20.0, 7.0))
    found = seen(made, 10.0, 20.0)
    assert found.answers == 2
    assert found.ttft_p95_s == pytest.approx(0.39)


def test_a_gap_belongs_to_when_it_ended() -> None:
    made = journal(outcome(8.0, 1.0, (0.5, 3.0, 0.25, 9.0)))  # at 9.5, 12.5, 12.75 and 21.75
    found = seen(made, 10.0, 20.0)
    assert found.longest_gap_s == 3.0
    assert found.itl_p99_s == pytest.approx(0.25 + 0.99 * 2.75)
    assert found.ttft_p95_s is None
    assert seen(made, 20.0, 30.0).longest_gap_s == 9.0


def test_a_failure_belongs_to_when_it_ended_or_also_to_when_it_was_sent() -> None:
    left = outcome(8.0, 1.0, (4.0,), ABORTED)  # until 13
    refused = outcome(25.0, None, (), REFUSED)
    made = journal(left, refused)
    assert seen(made, 5.0, 9.0).failures == ()
    assert seen(made, 5.0, 9.0, and_later=True).failures == ("aborted: ",)
    assert seen(made, 5.0, 8.0, and_later=True).failures == ()
    assert seen(made, 12.0, 20.0).failures == ("aborted: ",)
    assert seen(made, 20.0, 30.0).failures == ("refused: ",)


def test_nothing_was_seen() -> None:
    found = seen(journal(), 0.0, 10.0)
    assert (found.answers, found.ttft_p95_s, found.itl_p99_s, found.longest_pause_s) == (
        0,
        None,
        None,
        None,
    )


def test_probes_tell_pauses_and_failures() -> None:
    lines = [probe_line(1.0, 0.01, 200), probe_line(2.0, 0.5, 200), probe_line(3.0, 2.0, 0)]
    made = read(lines)
    assert seen(made, 0.0, 2.5).longest_pause_s == 0.5
    assert seen(made, 0.0, 2.5).failures == ()
    assert seen(made, 2.5, 9.0).failures == ("/health: no answer",)


def test_a_journal_that_is_being_written() -> None:
    one = outcome(1.0)
    lines = [sent_line("1.0"), probe_line(1.0, 0.01, 200), ended_line(one), sent_line("2.0")]
    made = read([*lines, '{"ended": {"id'])
    assert (made.sent, made.outcomes, len(made.probes)) == (2, [one], 1)
