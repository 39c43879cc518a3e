"""What an ingress hears of replicas, connection by connection."""

from __future__ import annotations

from serve_app.routing.changes import change
from serve_app.routing.reports import ReplicaConnection, Reports
from serve_app.routing.score import Report

FIRST, SECOND = Report(n_live=1, blocks=frozenset([1])), Report(n_live=2, blocks=frozenset([2]))


def say(connection: ReplicaConnection, before: Report | None, after: Report) -> None:
    body = change(before, after)
    assert body is not None
    connection.take(body)


def newest(reports: Reports) -> Report | None:
    heard = reports.newest("r")
    return None if heard is None else heard.report


def test_the_newest_report_is_read() -> None:
    reports = Reports()
    assert not reports.hears("r")
    connection = reports.connection("r")
    assert reports.hears("r")
    assert newest(reports) is None
    say(connection, None, FIRST)
    at = connection.heard.at if connection.heard else None
    say(connection, FIRST, SECOND)
    assert newest(reports) == SECOND
    assert connection.heard is not None
    assert at is not None
    assert connection.heard.at >= at
    assert reports.newest("s") is None


def test_who_leaves_is_heard_no_more_and_watchers_are_told() -> None:
    reports, left = Reports(), list[str]()
    reports.watch(left.append)
    connection = reports.connection("r")
    say(connection, None, FIRST)
    connection.end()
    connection.end()
    assert not reports.hears("r")
    assert newest(reports) is None
    assert left == ["r"]


def test_a_new_connection_begins_anew_and_the_end_of_the_old_one_means_nothing() -> None:
    reports, left = Reports(), list[str]()
    reports.watch(left.append)
    old = reports.connection("r")
    say(old, None, FIRST)
    new = reports.connection("r")
    say(new, None, SECOND)
    old.end()
    assert newest(reports) == SECOND
    assert left == []
