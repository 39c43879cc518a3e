"""From prompts and parameters to streams of deltas: what every protocol's routes share."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from serve_app.errors import CorralError, InvalidRequestError, PromptTooLongError
from serve_app.ingress.generation.tokenization import refuse_unknown_tokens
from serve_app.ingress.http import request_context
from serve_app.ingress.model_registry import ServedModel
from serve_app.ingress.openai.protocol import GenerationParams
from serve_app.sampling import SamplingParams
from serve_app.types import GenerationRequest, TokenDelta

Deltas = AsyncGenerator[tuple[int, TokenDelta]]
"""The deltas of several sequences as they come, each with its sequence's index."""


def requests(
    model: ServedModel,
    answer_id: str,
    prompts: Sequence[tuple[int, ...]],
    n: int,
    params: GenerationParams,
    sampling: SamplingParams,
    prompt_field: str,
) -> list[GenerationRequest]:
    """`n` requests for each prompt, one prompt's after the other's. Raises InvalidRequestError for what
    this model cannot do, KeyLimitError or RateLimitError for what the caller may not."""
    for prompt in prompts:
        if not prompt:
            raise InvalidRequestError("The prompt is empty.", prompt_field)
        if len(prompt) >= model.n_ctx_slot:
            raise PromptTooLongError(len(prompt), model.n_ctx_slot, prompt_field)
    if params.context_shift and sampling.max_tokens is None:
        raise InvalidRequestError(
            "'context_shift' needs 'max_tokens': the text might never end.", "context_shift"
        )
    refuse_unknown_tokens(model, "logit_bias", [token for token, _ in sampling.logit_bias])
    many = len(prompts) * n > 1
    caller = request_context.current()
    caller.admit(prompts)
    return [
        GenerationRequest(
            f"{answer_id}.{i * n + j}" if many else answer_id,
            prompt,
            _reseeded(sampling, j),
            http_id=caller.request_id,
            client=caller.client(params.user),
            priority=params.priority,
            context_shift=params.context_shift,
            n_keep=params.n_keep,
            cache_group=caller.cache_group(params.cache_salt),
        )
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]


def with_bias(sampling: SamplingParams, bias: Sequence[tuple[int, float]]) -> SamplingParams:
    """The same with this `logit_bias`; of a token that is named twice, the last counts."""
    return dataclasses.replace(sampling, logit_bias=tuple(dict(bias).items()))


def _reseeded(sampling: SamplingParams, number: int) -> SamplingParams:
    """So that several answers to one prompt differ."""
    if sampling.seed is None or number == 0:
        return sampling
    return dataclasses.replace(sampling, seed=sampling.seed + number)


async def start(model: ServedModel, wanted: Sequence[GenerationRequest]) -> Deltas:
    """Start the requests, and wait for the first delta of any: until then, an answer's status can still
    say what went wrong. Raises CorralError."""
    deltas = _merged([model.engine.generate(request) for request in wanted])
    first = await anext(deltas)
    return _chain(first, deltas)


async def collected(deltas: Deltas, n: int) -> list[list[TokenDelta]]:
    """Read all of `n` sequences to their ends. Raises CorralError."""
    found: list[list[TokenDelta]] = [[] for _ in range(n)]
    async for index, delta in deltas:
        found[index].append(delta)
    return found


async def _chain(first: tuple[int, TokenDelta], rest: Deltas) -> Deltas:
    caller = request_context.current()
    try:
        caller.charge(len(first[1].token_ids))
        yield first
        async for item in rest:
            caller.charge(len(item[1].token_ids))
            yield item
    finally:
        await rest.aclose()


async def _merged(streams: Sequence[AsyncGenerator[TokenDelta]]) -> Deltas:
    """All deltas as they come, up to every stream's end; the first failure ends all."""
    arrived: asyncio.Queue[tuple[int, TokenDelta] | Exception] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterator[TokenDelta]) -> None:
        try:
            async for delta in stream:
                arrived.put_nowait((index, delta))
                if delta.end is not None:
                    return
            raise CorralError("The engine's stream ended without an end.")
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        n_open = len(streams)
        while n_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            yield item
            n_open -= item[1].end is not None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
