"""Reads a request's answer from an engine of this process, and notes when its tokens came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

from serve_app.engine import (
    CorralError,
    Engine,
    GenerationRequest,
    TokenDelta,
    TokenStream,
    Usage,
)


class Arrivals:
    """A sink, as the server has them: the decoder thread calls it, and no other thread computes."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each token was told, by `time.perf_counter()`."""
        self.ended = Future[None]()

    def __call__(self, delta: TokenDelta) -> None:
        """Note when that came."""
        self.times += [time.perf_counter()] * len(delta.token_ids)
        if delta.end is None:
            return
        if delta.end.error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(delta.end.error)


def all_arrivals(
    engine: Engine, requests: Sequence[GenerationRequest], timeout_s: float
) -> list[list[float]]:
    """When each token of each request was told, all submitted at once. Raises a refusal, what one of them
    ends with, and TimeoutError."""
    sinks = [Arrivals() for _ in requests]
    deadline = time.monotonic() + timeout_s
    for refusal in engine.submit_to(list(zip(requests, sinks, strict=True))):
        if refusal is not None:
            raise refusal
    for sink in sinks:
        sink.ended.result(deadline - time.monotonic())
    return [sink.times for sink in sinks]


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
