"""Broadcasts what the replicas do to all viewers, who share one look a second."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from serve_app.apis.page.snapshot import (
    NOTHING,
    Board,
    Json,
    difference,
    only_models,
    without_requests,
)
from serve_app.base.errors import EngineClosedError
from serve_app.server.answering.answers import EventAnswer
from serve_app.server.http import request_context, sse
from serve_app.server.http.description import STREAMED, api_router
from serve_app.server.model_registry import ServedModel
from serve_app.server.shared_looks import SharedLooks

PERIOD_S = 1.0
"""The seconds between two looks."""
N_FRAMES = 60
"""The frames after which a viewer has to subscribe again: Serve stops no ingress replica while it has a
request."""
_LINGER_S = 10.0
"""The board is kept for so long without viewers: one who comes back finds its rates and events."""
MAX_VIEWERS = 64
"""The most viewers of one ingress replica at once."""

logger = logging.getLogger("corral.ingress")


class Broadcaster:
    """Asks the replicas for their statistics while there are viewers. Used in one event loop."""

    def __init__(self, models: Mapping[str, ServedModel], period_s: float = PERIOD_S) -> None:
        self._models = models
        self._looks = SharedLooks(lambda _: self._logged_look(), period_s)
        self._viewers: dict[object, str] = {}
        """Viewers and their owners, in the order in which they came."""
        self._board = Board()
        self._looked_at = time.monotonic()

    async def frames(
        self, seen: Callable[[Json], Json] = dict, holder: str = ""
    ) -> AsyncGenerator[Json]:
        """The whole board, and then what changes (see `difference`), `N_FRAMES` in all at most;
        none after the application's end. A slow viewer gets all changes since its last frame in
        one. `seen` is what of a view is told. With more than `MAX_VIEWERS`, the first of the
        `holder` who has most is told no more."""
        viewer, before = object(), NOTHING
        self._add(viewer, holder)
        try:
            for _ in range(N_FRAMES):
                try:
                    after = await self._looks.ask()
                except Exception:  # it is logged; viewers subscribe again
                    return
                if viewer not in self._viewers:
                    return
                yield difference(seen(before), seen(after))
                before = after
        finally:
            self._viewers.pop(viewer, None)

    def _add(self, viewer: object, holder: str) -> None:
        self._viewers[viewer] = holder
        if len(self._viewers) > MAX_VIEWERS:
            held = Counter(self._viewers.values())
            del self._viewers[max(self._viewers, key=lambda one: held[self._viewers[one]])]

    async def _logged_look(self) -> Json:
        try:
            return await self._look()
        except EngineClosedError:
            logger.info("The application stops; the broadcast ends.")
            raise
        except Exception:
            logger.exception("The replicas' statistics cannot be broadcast.")
            raise

    async def _look(self) -> Json:
        if time.monotonic() - self._looked_at > _LINGER_S:
            self._board = Board()
        models = dict(self._models)  # some may come or go meanwhile
        engines = [model.engine for model in models.values()]
        states, answers, fetching = await asyncio.gather(
            asyncio.gather(*(engine.replica_states() for engine in engines)),
            asyncio.gather(*(engine.stats() for engine in engines)),
            asyncio.gather(*(engine.fetching() for engine in engines)),
        )
        self._board.look(
            {model: one.found for model, one in zip(models, answers, strict=True)},
            {model: one.missing for model, one in zip(models, answers, strict=True)},
            dict(zip(models, states, strict=True)),
            time.monotonic(),
            time.time(),
            dict(zip(models, fetching, strict=True)),
            self._load_states(),
        )
        self._looked_at = time.monotonic()
        return self._board.view

    def _load_states(self) -> dict[str, Json]:
        """Whether models on demand are loaded, by their ids."""
        return {
            name: {"loaded": one.engine.is_loaded}
            for name, one in self._models.items()
            if one.is_on_demand
        }


ROUTER = api_router()


@ROUTER.get("/v1/live", response_class=StreamingResponse, responses=STREAMED)
async def live(request: Request) -> Response:
    """Server-sent events, one a second: the first is all that replicas do, the others are what
    changes, as JSON merge patches. They end after a minute; a viewer who stays asks again. You get the
    models that you may use, and only operators the contents of slots."""
    broadcaster: Broadcaster = request.app.state.broadcaster
    caller = request_context.current()

    def seen(view: Json) -> Json:
        shown = view if caller.allowed_models is None else only_models(view, caller.may_use)
        return dict(shown) if caller.is_operator else without_requests(shown)

    frames = broadcaster.frames(seen, caller.holder)
    also = {"takes_batches": request.app.state.batches is not None, "operates": caller.is_operator}
    return sse.EventStream(_encode_frames(frames, also), EventAnswer())


async def _encode_frames(frames: AsyncGenerator[Json], also: Json) -> AsyncGenerator[bytes]:
    async with aclosing(frames):
        async for frame in frames:
            yield sse.data(frame | also)
            also = {}
