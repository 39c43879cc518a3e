"""What goes into the log of a replica."""

from __future__ import annotations

import logging

from serve_app.logs import MOST_PER_S, AccessLogBound


def access(text: str) -> logging.LogRecord:
    record = logging.LogRecord("ray.serve", logging.INFO, "", 0, text, (), None)
    record.serve_access_log = True
    return record


def test_a_flood_leaves_no_more_lines_than_its_bound_and_nothing_else_is_left_out() -> None:
    now = 0.0
    bound = AccessLogBound(lambda: now)
    assert [bound.filter(access("POST 429")) for _ in range(MOST_PER_S + 7)].count(True) == 50
    other = logging.LogRecord("corral", logging.INFO, "", 0, "a model", (), None)
    assert bound.filter(other)
    now = 1.0
    first, second = access("GET 200"), access("GET 200")
    assert bound.filter(first)
    assert bound.filter(second)
    assert first.getMessage() == "GET 200 (before it, 7 lines were left out)"
    assert second.getMessage() == "GET 200"
