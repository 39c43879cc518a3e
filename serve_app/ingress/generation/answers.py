"""The base of all protocols' answers: one body, or the events of a stream."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from fastapi.responses import JSONResponse, Response

from serve_app.errors import CorralError
from serve_app.ingress.generation import generation
from serve_app.ingress.generation.generation import Deltas
from serve_app.ingress.generation.preparation import Generation
from serve_app.ingress.http import sse
from serve_app.ingress.http.errors import error_body, unexpected
from serve_app.ingress.http.sse import Json
from serve_app.ingress.model_registry import ServedModel
from serve_app.types import TokenDelta

logger = logging.getLogger("corral.ingress")


class ProtocolAnswer(ABC):
    """An answer on its way, in one protocol's form."""

    ping = sse.PING
    media_type = "text/event-stream"

    @abstractmethod
    def whole(self, sequences: Sequence[Sequence[TokenDelta]]) -> Any:
        """The body of an answer without a stream, from the deltas of each sequence."""

    @abstractmethod
    def events(self, index: int, delta: TokenDelta) -> Iterable[Json]:
        """The events of a delta of the sequence with this index."""

    def opening(self) -> Iterable[Json]:
        """The events before all deltas."""
        return ()

    def closing(self) -> Iterable[bytes]:
        """The end of a complete stream, as it is sent."""
        return ()

    def failed(self, error: CorralError) -> Json:
        """The last event of a stream that fails."""
        return error_body(error)

    def written(self, event: Json) -> bytes:
        """An event as it is sent."""
        return sse.data(event)

    async def respond(self, model: ServedModel, plan: Generation, answer_id: str) -> Response:
        """Start the plan's requests, and answer as it says. Raises CorralError if one is refused, or is not
        allowed to the caller of this task."""
        requests = generation.requests(answer_id, plan)
        deltas = await generation.start(model, requests)
        if plan.stream:
            events, interval_s = self._stream(deltas), plan.sse_ping_interval
            return sse.EventStream(events, interval_s, self.ping, self.media_type)
        sequences: list[list[TokenDelta]] = [[] for _ in requests]
        async for index, delta in deltas:
            sequences[index].append(delta)
        return JSONResponse(self.whole(sequences))

    async def _stream(self, deltas: Deltas) -> AsyncIterator[bytes]:
        """The events, those that come together in one piece. The deltas are closed at the end, whatever
        happens."""
        try:
            if begun := b"".join(map(self.written, self.opening())):
                yield begun
            async for index, delta in deltas:
                if events := b"".join(map(self.written, self.events(index, delta))):
                    yield events
            if ended := b"".join(self.closing()):
                yield ended
        except CorralError as error:
            yield self.written(self.failed(error))
        except Exception:
            logger.exception("A stream failed")
            yield self.written(self.failed(unexpected()))
        finally:
            await deltas.aclose()
