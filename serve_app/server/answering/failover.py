"""Failover: a request goes on elsewhere when its replica is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from serve_app.base.errors import (
    CorralError,
    EngineClosedError,
    EngineFailedError,
    ModelReplacedError,
    QueueFullError,
)
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.requests import GenerationRequest

logger = logging.getLogger("corral.ingress")

T = TypeVar("T")
Attempt = Callable[[GenerationRequest], AsyncGenerator[Accepted | TokenDelta]]
"""Runs a request on some replica, to its end. Raises CorralError."""

LOST = (EngineFailedError, EngineClosedError, ModelReplacedError)
"""The errors of a replica that cannot go on, although another one may."""

PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""The pauses before new attempts, and how many there may be. A replica that failed counts for the whole
request, whatever tokens it brought: the request may be what breaks the replicas. A replica that was shut
down or replaced counts until the next token."""

_REFUSED_S = 120.0
"""The seconds for which an accepted request tries, while the replicas that are left have no room."""


async def unbroken(
    request: GenerationRequest, attempt: Attempt, pauses_s: tuple[float, ...] = PAUSES_S
) -> AsyncGenerator[Accepted | TokenDelta]:
    """The deltas of a request whose replicas may be lost. Each replica goes on behind the last token of the
    one before: no character is missing or comes twice. Of their acceptances, the first is told. Raises
    CorralError."""
    first, tokens, is_accepted = request, list(request.generated), False
    began = progressed = time.monotonic()
    n_failovers = n_failed = n_lost = 0
    failovers_s: list[float] = []
    while True:
        try:
            async with aclosing(attempt(request)) as items:
                async for item in items:
                    if isinstance(item, TokenDelta):
                        tokens += item.token_ids
                        if item.token_ids:
                            n_lost, progressed = n_failed, time.monotonic()
                    elif is_accepted:
                        continue
                    is_accepted = True
                    yield item
                    if isinstance(item, TokenDelta) and item.end is not None:
                        return
            raise EngineFailedError("The engine's stream ended without an end.")
        except LOST as error:
            if n_lost == len(pauses_s):
                raise
            failure: CorralError = error
            pause_s = pauses_s[n_lost]
            n_lost += 1
            n_failed += isinstance(error, EngineFailedError)
        except QueueFullError as error:
            if not is_accepted or time.monotonic() - progressed >= _REFUSED_S:
                raise
            failure, pause_s = error, min(1.0, error.retry_after_s)
        logger.warning(
            "%s continues on another replica after %d tokens: %s", first.id, len(tokens), failure
        )
        await asyncio.sleep(pause_s)
        n_failovers += 1
        failovers_s.append(time.monotonic() - began - sum(failovers_s))
        request = continuation(first, tuple(tokens), n_failovers, tuple(failovers_s))


async def retry(attempt: Callable[[], Awaitable[T]], pauses_s: tuple[float, ...] = PAUSES_S) -> T:
    """The result of the first attempt whose replica is not lost meanwhile. Raises CorralError."""
    for pause_s in pauses_s:
        try:
            return await attempt()
        except LOST as error:
            logger.warning("Tried again on another replica: %s", error)
            await asyncio.sleep(pause_s)
    return await attempt()


def continuation(
    request: GenerationRequest, tokens: tuple[int, ...], n: int, failovers_s: tuple[float, ...] = ()
) -> GenerationRequest:
    """The request of the `n`th one that continues behind these tokens. It has an id of its own: the last
    one may linger where it was. A seeded draw is another one, as the same numbers again would favour the
    same words. News of the prompt comes with the first token."""
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = dataclasses.replace(sampling, seed=sampling.seed + len(tokens))
    if tokens:
        sampling = dataclasses.replace(sampling, prompt_logprobs=False)
    return dataclasses.replace(
        request,
        id=f"{request.id}~{n}",
        sampling=sampling,
        generated=tokens,
        n_failovers=n,
        failovers_s=failovers_s,
    )
