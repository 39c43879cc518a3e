"""Failover: a request goes on elsewhere when its replica is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from serve_app.errors import (
    CorralError,
    EngineClosedError,
    EngineFailedError,
    ModelReplacedError,
    QueueFullError,
)
from serve_app.types import Accepted, GenerationRequest, TokenDelta

logger = logging.getLogger("corral.ingress")

T = TypeVar("T")
Attempt = Callable[[GenerationRequest], AsyncGenerator[Accepted | TokenDelta]]
"""Runs a request on some replica, to its end. Raises CorralError."""

LOST = (EngineFailedError, EngineClosedError, ModelReplacedError)
"""The errors of a replica that cannot go on, although another one may."""

PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each new attempt. After as many that brought no token, the request fails: it may be what breaks
the replicas."""

_REFUSED_S = 120.0
"""While the replicas that are left have no room, a request that was accepted tries for so long."""


async def unbroken(
    request: GenerationRequest, attempt: Attempt, pauses_s: tuple[float, ...] = PAUSES_S
) -> AsyncGenerator[Accepted | TokenDelta]:
    """The deltas of a request whose replicas may be lost: each goes on behind the last token that came from
    the one before, so that no character is missing or comes twice. Of their acceptances, the first is told.
    Raises CorralError."""
    life = _Life(request, pauses_s)
    while True:
        try:
            async with aclosing(attempt(life.request)) as items:
                async for item in items:
                    if isinstance(item, Accepted):
                        if life.is_first_acceptance():
                            yield item
                        continue
                    life.delivered(item)
                    yield item
                    if item.end is not None:
                        return
            raise EngineFailedError("The engine's stream ended without an end.")
        except CorralError as error:
            pause_s = life.pause_s(error)
            if pause_s is None:
                raise
            logger.warning(
                "%s continues on another replica after %d tokens: %s",
                request.id,
                life.n_tokens,
                error,
            )
            await asyncio.sleep(pause_s)
            life.go_on()


async def retried(attempt: Callable[[], Awaitable[T]], pauses_s: tuple[float, ...] = PAUSES_S) -> T:
    """The result of the first attempt whose replica is not lost meanwhile. Raises CorralError."""
    for pause_s in pauses_s:
        try:
            return await attempt()
        except LOST as error:
            logger.warning("Tried again on another replica: %s", error)
            await asyncio.sleep(pause_s)
    return await attempt()


class _Life:
    """The attempts of a request so far."""

    def __init__(self, request: GenerationRequest, pauses_s: tuple[float, ...]) -> None:
        self.request = self._asked = request
        self._pauses_s = pauses_s
        self._tokens = list(request.generated)
        self._began = self._progressed = time.monotonic()
        self._n_failovers = self._n_fruitless = 0
        self._is_accepted = False

    @property
    def n_tokens(self) -> int:
        """Tokens that were delivered."""
        return len(self._tokens)

    def is_first_acceptance(self) -> bool:
        """A replica has accepted it: whether none had before."""
        was, self._is_accepted = self._is_accepted, True
        return not was

    def delivered(self, delta: TokenDelta) -> None:
        """Note that a delta was delivered."""
        self._tokens += delta.token_ids
        if delta.token_ids:
            self._n_fruitless, self._progressed = 0, time.monotonic()

    def pause_s(self, error: CorralError) -> float | None:
        """Seconds to wait before the request is sent again after this error; None if that is its end."""
        if isinstance(error, LOST):
            self._n_fruitless += 1
            if self._n_fruitless <= len(self._pauses_s):
                return self._pauses_s[self._n_fruitless - 1]
        if isinstance(error, QueueFullError) and self._is_accepted:
            waited_s = time.monotonic() - self._progressed
            return min(1.0, error.retry_after_s) if waited_s < _REFUSED_S else None
        return None

    def go_on(self) -> None:
        """Be what the next replica is asked for. It has an id of its own: the last one may linger
        where it was. A seeded draw is another one, as the same numbers again would favour the same
        words. News of the prompt comes with the first token."""
        self._n_failovers += 1
        sampling = self._asked.sampling
        if sampling.seed is not None:
            sampling = dataclasses.replace(sampling, seed=sampling.seed + len(self._tokens))
        if self._tokens:
            sampling = dataclasses.replace(sampling, prompt_logprobs=False)
        self.request = dataclasses.replace(
            self._asked,
            id=f"{self._asked.id}~{self._n_failovers}",
            sampling=sampling,
            generated=tuple(self._tokens),
            n_failovers=self._n_failovers,
            failed_over_s=time.monotonic() - self._began,
        )
