"""Those who watch the replicas, and the one look a second that all of them share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from fastapi import FastAPI
from fastapi.responses import Response

from serve_app.errors import EngineClosedError
from serve_app.ingress.dashboard.snapshot import NOTHING, Board, Json, difference
from serve_app.ingress.http import sse
from serve_app.ingress.model_registry import ServedModel

PERIOD_S = 1.0
"""Between two looks."""
N_FRAMES = 60
"""After which a watcher has to come again: Serve stops no ingress replica while it has a request."""
# How long the board is kept without watchers: one who comes back finds its rates and events.
_LINGER_S = 10.0

logger = logging.getLogger("corral.ingress")


class Watch:
    """Asks the replicas for their statistics while anybody wants to know. Used in one event loop."""

    def __init__(self, models: Mapping[str, ServedModel], period_s: float = PERIOD_S) -> None:
        self._models = models
        self._period_s = period_s
        self._n_watchers = 0
        self._looking: asyncio.Task[None] | None = None
        self._board = Board()
        self._looked = asyncio.Condition()
        self._stopped = -_LINGER_S

    async def frames(self) -> AsyncGenerator[Json]:
        """The whole board, and then what changes (see `difference`), `N_FRAMES` in all at most; none
        after the application's end. Whoever is slow gets all that changed meanwhile in one."""
        looking = self._enter()
        try:
            before = NOTHING
            for _ in range(N_FRAMES):
                async with self._looked:
                    await self._looked.wait_for(
                        lambda: self._looking is not looking or self._board.view is not before  # noqa: B023
                    )
                if self._looking is not looking:
                    return
                after = self._board.view
                yield difference(before, after)
                before = after
        finally:
            self._leave()

    def _enter(self) -> asyncio.Task[None]:
        self._n_watchers += 1
        if self._looking is None:
            if time.monotonic() - self._stopped > _LINGER_S:
                self._board = Board()
            self._looking = asyncio.create_task(self._look_on())
        return self._looking

    def _leave(self) -> None:
        self._n_watchers -= 1
        if self._n_watchers == 0 and self._looking is not None:
            self._looking.cancel()
            self._looking, self._stopped = None, time.monotonic()

    async def _look_on(self) -> None:
        """Until it is cancelled, or there is nothing to look at any more."""
        try:
            while True:
                began = time.monotonic()
                await self._look()
                async with self._looked:
                    self._looked.notify_all()
                await asyncio.sleep(began + self._period_s - time.monotonic())
        except EngineClosedError:
            logger.info("The application stops; nobody watches any more.")
        except Exception:  # those who watch come again
            logger.exception("The replicas cannot be watched.")
        finally:
            if self._looking is asyncio.current_task():  # and not the one after it
                self._looking = None
            async with self._looked:
                self._looked.notify_all()

    async def _look(self) -> None:
        engines = [model.engine for model in self._models.values()]
        states, found = await asyncio.gather(
            asyncio.gather(*(engine.replica_states() for engine in engines)),
            asyncio.gather(*(engine.stats() for engine in engines)),
        )
        self._board.look(
            {model: one.found for model, one in zip(self._models, found, strict=True)},
            {model: one.missing for model, one in zip(self._models, found, strict=True)},
            dict(zip(self._models, states, strict=True)),
            time.monotonic(),
            time.time(),
        )


def add(app: FastAPI, models: Mapping[str, ServedModel]) -> None:
    """Add the route to an application."""
    watch = Watch(models)

    @app.get("/v1/live", response_model=None)
    async def live() -> Response:
        """Server-sent events, one a second: the first is all that replicas do, the others are what changes,
        as JSON merge patches. They end after a minute; whoever watches on asks again."""
        return sse.response(_written(watch.frames()))


async def _written(frames: AsyncGenerator[Json]) -> AsyncGenerator[str]:
    async with aclosing(frames):
        async for frame in frames:
            yield sse.data(frame)
