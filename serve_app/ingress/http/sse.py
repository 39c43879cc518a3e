"""Writes answers as server-sent events.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serve_app.errors import CorralError
from serve_app.ingress.generation.generation import Deltas
from serve_app.ingress.http.errors import unexpected
from serve_app.ingress.http.pings import PingingSend
from serve_app.types import TokenDelta

logger = logging.getLogger("corral.ingress")

Json = dict[str, Any]

PING = ": ping\n\n"
"""A comment: readers drop it."""


def data(body: Json) -> str:
    """An event without a name."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def named(body: Json) -> str:
    """An event that is named after its `type`."""
    return f"event: {body['type']}\n{data(body)}"


async def events(
    deltas: Deltas,
    bodies: Callable[[int, TokenDelta], Iterable[Json]],
    failed: Callable[[CorralError], Json],
    *,
    opening: Iterable[Json] = (),
    closing: Callable[[], Iterable[str]] = tuple,
    write: Callable[[Json], str] = data,
) -> AsyncIterator[str]:
    """The events of an answer: `opening`, the `bodies` of each sequence's deltas, and `closing`, which are
    written already. A failure on the way is the last event. The deltas are closed at the end, whatever
    happens."""
    try:
        for body in opening:
            yield write(body)
        async for index, delta in deltas:
            for body in bodies(index, delta):
                yield write(body)
        for event in closing():
            yield event
    except CorralError as error:
        yield write(failed(error))
    except Exception:
        logger.exception("A stream failed")
        yield write(failed(unexpected()))
    finally:
        await deltas.aclose()


class EventStream(StreamingResponse):
    """The answer to an HTTP request, which no proxy shall hold back, or take for dead."""

    def __init__(
        self, events: AsyncIterator[str], ping_interval_s: float | None = None, ping: str = PING
    ) -> None:
        """`ping` is sent whenever nothing was sent for so many seconds; 0 and less: never; None: as the
        application's `state.sse_ping_interval_s` says."""
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._interval_s = ping_interval_s
        self._ping = ping.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        interval_s = self._interval_s
        if interval_s is None:
            interval_s = scope["app"].state.sse_ping_interval_s
        if interval_s <= 0:
            await super().__call__(scope, receive, send)
            return
        pinging = PingingSend(send, self._ping, interval_s)
        try:
            await super().__call__(scope, receive, pinging)
        finally:
            pinging.close()
