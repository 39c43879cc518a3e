"""What goes into the log of a replica."""

from __future__ import annotations

import logging

from serve_app.base.logs import (
    MOST_PER_S,
    AccessLogBound,
    ClientText,
    NoTexts,
    OneLine,
    forward_to_serve,
)


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


def test_a_clients_text_makes_no_line_of_its_own() -> None:
    text = "temp\nERROR corral: forged\x1b[2J\u2028"
    records = [
        logging.LogRecord("corral.ingress", logging.INFO, "", 0, "Ignored %s.", (text,), None),
        access(f"POST {text} 200"),
    ]
    for record in records:
        assert OneLine().filter(record)
        assert record.getMessage().isprintable()
        assert "temp\\nERROR corral: forged\\x1b[2J\\u2028" in record.getMessage()


def test_every_handler_of_serve_keeps_lines_whole() -> None:
    serve, handler = logging.getLogger("ray.serve"), logging.StreamHandler()
    corral = logging.getLogger("corral")
    parent, level, filters = corral.parent, corral.level, list(serve.filters)
    serve.addHandler(handler)
    try:
        forward_to_serve()
        assert any(isinstance(entry, OneLine) for entry in handler.filters)
    finally:
        serve.removeHandler(handler)
        serve.filters[:] = filters
        corral.parent = parent
        corral.setLevel(level)


def test_lines_without_texts_name_errors_only() -> None:
    secret = "my password"
    try:
        try:
            raise KeyError(secret)
        except KeyError:
            raise ValueError(secret) from None
    except ValueError as error:
        failed = (type(error), error, error.__traceback__)
    lines = [
        ("%s is refused: %s", ("request-1", ValueError(secret)), None),
        ("Ignored unknown fields of a request: %s.", (ClientText(secret),), None),
        ("%s failed", ("work",), failed),
    ]
    written = []
    for message, args, exc_info in lines:
        record = logging.LogRecord("corral", logging.INFO, "", 0, message, args, exc_info)
        assert NoTexts().filter(record)
        written.append(logging.Formatter().format(record))
    assert not any(secret in line for line in written)
    assert written[0] == "request-1 is refused: ValueError"
    assert written[1] == "Ignored unknown fields of a request: ClientText."
    assert "test_logs.py" in written[2]
    assert written[2].endswith("ValueError")
    assert not NoTexts().filter(access(f"POST /{secret} 200"))
