"""Sends one user's request and reads its stream; tells a journal and a listener what became of it.

Runs on gevent. Each request has a connection of its own, so that none is ever sent twice by a client that
finds a kept-alive one closed. Reports during a stream cost microseconds: see
tests/integration/loadtests/test_load_client.py for what the client sustains.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TextIO

import gevent
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketPoolResponse

from loadtests.load.stream_metrics import Slo, ended_line, meets, sent_line, token_s
from serve_app.cli.measure.outcomes import (
    ABORTED,
    COMPLETE,
    FAILED,
    REFUSED,
    Outcome,
    Reader,
    heard,
)
from serve_app.cli.measure.users import Ask

TIMEOUT_S = 300.0
"""Longest silence of a server."""
HEADERS = {"Content-Type": "application/json", "Connection": "close"}

Listen = Callable[[str, str, float, str], None]
"""Called with what was measured, the user's kind, milliseconds (tokens/s for TOKENS), and an error."""


class _LeftError(BaseException):
    """The user hung up. Nothing but `send` may catch it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The result for a user."""

    text: str
    retry_after_s: float
    """How long a user who was refused should wait; else 0."""


class LoadClient:
    """Any greenlet may send. `journal` is written to, line by line."""

    def __init__(
        self, url: str, headers: dict[str, str], journal: TextIO, listen: Listen, slo: Slo
    ):
        self._url = url
        self._headers = HEADERS | headers
        self._journal = journal
        self._listen = listen
        self._slo = slo
        self._ids = (f"{os.getpid()}-{number}" for number in itertools.count())

    def send(self, ask: Ask, kind: str, late_s: float = 0.0) -> Answered:
        """Send this and read it to its end. `late_s`: how long ago it should have been sent, which is added
        to its times. A killed greenlet's request counts as aborted: the run is
        over, or the load shape wants fewer users."""
        start, reader = time.perf_counter() - late_s, Reader()
        begun = Outcome(next(self._ids), kind, time.time() - late_s, 0.0, FAILED, "")
        self._journal.write(sent_line(begun.id))
        end, reason, retry_after_s = FAILED, "", 0.0
        try:
            with gevent.Timeout(ask.leave_after_s, _LeftError()):
                end, reason, retry_after_s = self._exchange(ask, kind, start, reader)
        except _LeftError:
            end, reason = ABORTED, "left"
        except gevent.GreenletExit:
            end, reason = ABORTED, "stopped"
            raise
        except (OSError, HTTPParseError, ValueError) as error:
            reason = type(error).__name__
        finally:
            self._finish(ask, start, reader, replace(begun, end=end, reason=reason))
        return Answered(reader.text, retry_after_s)

    def _exchange(
        self, ask: Ask, kind: str, start: float, reader: Reader
    ) -> tuple[str, str, float]:
        """How it ended, why, and how long to stay away."""
        body = json.dumps(ask.body).encode()
        client = HTTPClient.from_url(
            self._url, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S
        )
        with closing(client):
            response = client.request("POST", ask.path, body, self._headers)
            with response:
                if response.status_code != 200:
                    return _refusal(response)
                self._read(response, ask, kind, start, reader)
        if reader.answer().error is None:
            return COMPLETE, "", 0.0
        return FAILED, reader.error_code or "no [DONE]", 0.0

    def _read(
        self, response: HTTPSocketPoolResponse, ask: Ask, kind: str, start: float, reader: Reader
    ) -> None:
        last = None
        while line := response.readline(b"\n"):
            now = time.perf_counter() - start
            if reader.feed(now, line):
                if not ask.read_pause_s:
                    name = "TTFT" if last is None else "ITL"
                    self._listen(name, kind, 1000 * (now - (last or 0.0)), "")
                last = now
            if ask.read_pause_s:
                gevent.sleep(ask.read_pause_s)

    def _finish(self, ask: Ask, start: float, reader: Reader, outcome: Outcome) -> None:
        wall_s = time.perf_counter() - start
        said = heard(reader.answer())
        if ask.read_pause_s:  # the user's own slowness says nothing of the server
            said |= {"ttft_s": None, "gaps_s": ()}
        outcome = replace(outcome, wall_s=wall_s, answer_id=reader.answer_id, **said)
        self._journal.write(ended_line(outcome))
        kind = outcome.kind
        if outcome.end in (REFUSED, ABORTED):
            self._listen(outcome.end.upper(), kind, 1000 * wall_s, "")
            return
        self._listen("E2E", kind, 1000 * wall_s, outcome.reason)
        if outcome.end == COMPLETE and (seconds := token_s(outcome)):
            self._listen("TOKENS/S", kind, 1 / seconds, "")
        if meets(outcome, self._slo):
            self._listen("GOOD", kind, 1000 * wall_s, "")


def _refusal(response: HTTPSocketPoolResponse) -> tuple[str, str, float]:
    status, body = response.status_code, response.read()
    try:
        error: dict[str, Any] = json.loads(body)["error"]
        code = str(error.get("code") or error.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        code = ""
    retry_after = response.get("retry-after")
    wait_s = float(retry_after) if isinstance(retry_after, str) and retry_after.isdecimal() else 0.0
    return (REFUSED if status == 429 else FAILED), f"{status} {code}".strip(), wait_s
