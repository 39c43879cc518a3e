"""Makes the engine's requests, starts them, and merges their streams of deltas, for every protocol."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

from serve_app.errors import CorralError
from serve_app.ingress.generation.preparation import Generation, PromptLength
from serve_app.ingress.http import request_context
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.sampling import SamplingParams
from serve_app.types import Accepted, GenerationRequest, TokenDelta

Deltas = AsyncGenerator[tuple[int, TokenDelta]]
"""The deltas of several sequences as they come, each with its sequence's index."""
_Items = AsyncGenerator[tuple[int, Accepted | TokenDelta]]


async def n_tokens(models: Mapping[str, ServedModel], found: PromptLength) -> int:
    """All of a prompt's, its pictures' included. Raises CorralError."""
    if not found.sizes:
        return found.n_tokens
    return found.n_tokens + await find(models, found.model).engine.media_tokens(found.sizes)


def requests(answer_id: str, wanted: Generation) -> list[GenerationRequest]:
    """The engine's requests: one prompt's after the other's. Raises KeyLimitError, RateLimitError
    or PermissionDeniedError for what the caller may not."""
    n = wanted.n
    many = len(wanted.prompts) * n > 1
    caller = request_context.current()
    caller.check_priority(wanted.priority)
    caller.ask_for(len(wanted.prompts) * n)
    caller.admit(wanted.prompts)
    return [
        GenerationRequest(
            f"{answer_id}.{i * n + j}" if many else answer_id,
            prompt,
            _reseeded(wanted.sampling, j),
            http_id=caller.request_id,
            client=caller.client(wanted.user),
            priority=wanted.priority,
            context_shift=wanted.context_shift,
            n_keep=wanted.n_keep,
            n_discard=wanted.n_discard,
            n_cache_reuse=wanted.n_cache_reuse,
            slot_id=wanted.id_slot,
            return_progress=wanted.return_progress or wanted.timings_per_token,
            cache_group=caller.cache_group(wanted.cache_salt),
            background=caller.is_background,
            told_together=not wanted.stream,
            adapters=wanted.adapters,
            media=wanted.media,
        )
        for i, prompt in enumerate(wanted.prompts)
        for j in range(n)
    ]


def _reseeded(sampling: SamplingParams, number: int) -> SamplingParams:
    """So that several answers to one prompt differ."""
    if sampling.seed is None or number == 0:
        return sampling
    return dataclasses.replace(sampling, seed=sampling.seed + number)


async def start(model: ServedModel, wanted: Sequence[GenerationRequest]) -> Deltas:
    """Start the requests, and wait until all of them are accepted: until then, an answer's status can still
    say what went wrong. Raises CorralError, and ends those that were accepted, if one is refused."""
    streams = [model.engine.generate(request) for request in wanted]
    items = _merged(streams) if len(streams) > 1 else _alone(*streams)
    early: list[tuple[int, TokenDelta]] = []
    refusable = set(range(len(wanted)))
    while refusable:
        index, item = await anext(items)
        refusable.discard(index)
        if isinstance(item, TokenDelta):
            early.append((index, item))
    return _charged(early, items)


async def collected(deltas: Deltas, n: int) -> list[list[TokenDelta]]:
    """Read all of `n` sequences to their ends. Raises CorralError."""
    found: list[list[TokenDelta]] = [[] for _ in range(n)]
    async for index, delta in deltas:
        found[index].append(delta)
    return found


async def _charged(early: list[tuple[int, TokenDelta]], rest: _Items) -> Deltas:
    """The deltas, each charged to the caller."""
    caller = request_context.current()
    try:
        for index, delta in early:
            caller.charge(len(delta.token_ids))
            yield index, delta
        async for index, item in rest:
            if isinstance(item, TokenDelta):
                caller.charge(len(item.token_ids))
                yield index, item
    finally:
        await rest.aclose()


async def _alone(stream: AsyncGenerator[Accepted | TokenDelta]) -> _Items:
    """The items of one stream, up to its end."""
    try:
        async for item in stream:
            yield 0, item
            if isinstance(item, TokenDelta) and item.end is not None:
                return
        raise CorralError("The engine's stream ended without an end.")
    finally:
        await stream.aclose()


async def _merged(streams: Sequence[AsyncGenerator[Accepted | TokenDelta]]) -> _Items:
    """All items as they come, up to every stream's end; the first failure ends all. Streams go on when
    their last item was taken: what comes meanwhile piles up in them as one delta."""
    arrived: asyncio.Queue[tuple[int, Accepted | TokenDelta] | Exception] = asyncio.Queue(1)

    async def read(index: int, stream: AsyncIterator[Accepted | TokenDelta]) -> None:
        try:
            async for item in stream:
                await arrived.put((index, item))
                if isinstance(item, TokenDelta) and item.end is not None:
                    return
            raise CorralError("The engine's stream ended without an end.")
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        n_open = len(streams)
        while n_open:
            found = await arrived.get()
            if isinstance(found, Exception):
                raise found
            yield found
            n_open -= isinstance(found[1], TokenDelta) and found[1].end is not None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
