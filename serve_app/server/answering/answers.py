"""The base of all protocols' answers: one body, or the events of a stream."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response

from serve_app.base.errors import CorralError
from serve_app.base.values.answers import TokenDelta
from serve_app.server.answering import streaming
from serve_app.server.answering.preparation import Generation
from serve_app.server.http import sse
from serve_app.server.http.errors import openai_error_body, unexpected_error
from serve_app.server.http.sse import Json
from serve_app.server.model_registry import ServedModel

logger = logging.getLogger("corral.ingress")


class EventAnswer(sse.StreamForm):
    """An answer on its way, as the events of a stream in one protocol's form."""

    media_type = "text/event-stream"

    def opening(self) -> Iterable[Json]:
        """The events before all others."""
        return ()

    def closing(self) -> Iterable[bytes]:
        """The end of a complete stream, as it is sent."""
        return ()

    def waiting(self) -> Iterable[Json]:
        """The events that tell a client to wait: they change nothing. None: a comment is sent."""
        return ()

    def ping(self) -> bytes:
        return b"".join(map(self.encode_event, self.waiting())) or sse.PING

    def failure_event(self, error: CorralError) -> Json:
        """The last event of a stream that fails."""
        return openai_error_body(error)

    def failure(self, error: CorralError) -> bytes:
        return self.encode_event(self.failure_event(error))

    def encode_event(self, event: Json) -> bytes:
        """An event as it is sent."""
        return sse.data(event)

    async def stream(
        self, news: Any, events: Callable[[Any], Iterable[Json]]
    ) -> AsyncIterator[bytes]:
        """The events of all that an asynchronous iterator brings, those that come together in one piece.
        The iterator is closed at the end, whatever happens. Raises StreamBrokenError behind the event of a
        failure."""
        async with aclosing(news):
            try:
                if begun := b"".join(map(self.encode_event, self.opening())):
                    yield begun
                async for item in news:
                    if written := b"".join(map(self.encode_event, events(item))):
                        yield written
                if ended := b"".join(self.closing()):
                    yield ended
                return
            except CorralError as error:
                failure = error
            except Exception:
                logger.exception("A stream failed")
                failure = unexpected_error()
            yield self.failure(failure)
            raise sse.StreamBrokenError


class ProtocolAnswer(EventAnswer, ABC):
    """An answer that is made of the deltas of sequences."""

    @abstractmethod
    def whole(self, sequences: Sequence[TokenDelta]) -> Any:
        """The body of an answer without a stream. All deltas of a sequence are one."""

    @abstractmethod
    def events(self, index: int, delta: TokenDelta) -> Iterable[Json]:
        """The events of a delta of the sequence with this index."""

    async def respond(self, model: ServedModel, plan: Generation, answer_id: str) -> Response:
        """Start the plan's requests, and answer as it says. Raises CorralError if one is refused, or is not
        allowed to the caller of this task."""
        requests = await streaming.requests(model, answer_id, plan)
        deltas = await streaming.start(model, requests)
        if plan.stream:
            events = self.stream(deltas, lambda item: self.events(*item))
            return sse.EventStream(events, self, plan.sse_ping_interval)
        sequences: list[list[TokenDelta]] = [[] for _ in requests]
        async for index, delta in deltas:
            sequences[index].append(delta)
        return sse.json_response(self.whole(list(map(TokenDelta.join, sequences))))
