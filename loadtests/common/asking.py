"""Reads a request's answer from an engine of this process, and notes when its tokens came."""

from __future__ import annotations

import time

from serve_app.engine import CorralError, Engine, GenerationRequest, TokenStream, Usage


async def arrivals(outcome: TokenStream | CorralError) -> tuple[list[float], Usage]:
    """When each token of a stream came, by `time.perf_counter()`, and what the engine says that it took.
    Raises a refusal, and RuntimeError if the stream has no end."""
    if isinstance(outcome, CorralError):
        raise outcome
    times: list[float] = []
    async with outcome as stream:
        async for delta in stream:
            times += [time.perf_counter()] * len(delta.token_ids)
            if delta.end is not None:
                return times, delta.end.usage
    raise RuntimeError("A stream had no end.")


async def ttft_s(engine: Engine, request: GenerationRequest) -> float:
    """Seconds from submitting a request to its first token; it is read to its end. Raises RuntimeError if
    it has none."""
    began = time.perf_counter()
    times, _ = await arrivals(engine.submit(request))
    if not times:
        raise RuntimeError(f"{request.id} had no token.")
    return times[0] - began
