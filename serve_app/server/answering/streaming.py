"""Starts prepared requests for this task's caller, reads and splits their deltas, for every protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence

from serve_app.base.errors import CorralError
from serve_app.base.values.answers import Accepted, FinishReason, TokenDelta
from serve_app.base.values.requests import GenerationRequest
from serve_app.prompt.output_parser import OutputParser, Part
from serve_app.server.answering.preparation import Chat, Generation, PromptLength
from serve_app.server.http import request_context
from serve_app.server.http.request_context import Caller, UsageCounts
from serve_app.server.model_registry import ServedModel, find


async def n_tokens(models: Mapping[str, ServedModel], length: PromptLength) -> int:
    """The tokens of a prompt, with its pictures and sounds. Raises CorralError."""
    if not length.sizes:
        return length.n_tokens
    return length.n_tokens + await find(models, length.model).engine.media_tokens(length.sizes)


async def requests(
    model: ServedModel, answer_id: str, generation: Generation
) -> list[GenerationRequest]:
    """The requests of all answers, the first prompt's first. `find` has found the model for the caller, who
    is charged. Raises KeyLimitError, RateLimitError or PermissionDeniedError for what it may not."""
    caller = request_context.current()
    caller.check_priority(generation.request.priority)
    most = [caller.most_new(len(p), generation.sampling.max_tokens) for p in generation.prompts]
    await caller.ask_for(generation.n_answers)
    await caller.admit(generation.prompts, generation.n_answers, most[0])
    return [
        dataclasses.replace(
            generation.request,
            id=f"{answer_id}.{i}" if generation.n_answers > 1 else answer_id,
            prompt=generation.prompts[i // generation.n],
            sampling=dataclasses.replace(
                generation.sampling_of(i), max_tokens=most[i // generation.n]
            ),
            http_id=caller.request_id,
            client=caller.client(generation.user),
            cache_group=caller.cache_group(generation.cache_salt),
            background=caller.is_background or generation.request.background,
            deadline=caller.answer_by.after(time.monotonic()),
            n_preparing=caller.n_preparing,
        )
        for i in range(generation.n_answers)
    ]


async def start(model: ServedModel, requests: Sequence[GenerationRequest]) -> Deltas:
    """Start the requests, and wait until all of them are accepted: until then, an answer's status can still
    say what went wrong. Raises CorralError, and ends those that were accepted, if one is refused."""
    streams = [model.engine.generate(request) for request in requests]
    caller = request_context.current()
    deltas = Deltas(
        streams,
        [
            # Of answers to one prompt, the first counts it, as its answer's `usage` does.
            RequestMeter(
                caller,
                model.id,
                request,
                counts_prompt=i == 0 or request.prompt is not requests[i - 1].prompt,
            )
            for i, request in enumerate(requests)
        ],
    )
    await deltas.wait_until_accepted()
    return deltas


_OUTCOMES: dict[FinishReason, UsageCounts] = {
    FinishReason.ERROR: {"failed": 1},
    FinishReason.ABORT: {"aborted": 1},
}


class RequestMeter:
    """Counts a request for its caller: tokens as they come, and what its end tells."""

    def __init__(
        self, caller: Caller, model: str, request: GenerationRequest, *, counts_prompt: bool
    ) -> None:
        self._counts_prompt = counts_prompt
        self._caller, self._model, self._request = caller, model, request
        self._prepared = time.monotonic_ns()
        self._n_prompt, self._n_tokens, self._n_counted = len(request.prompt), 0, 0
        self._has_ended = self._is_due = False
        self.is_accepted = False

    def on_accept(self) -> None:
        if not self.is_accepted:
            self.is_accepted = True
            n_prompt = self._n_prompt if self._counts_prompt else 0
            self._count({"requests": 1, "prompt_tokens": n_prompt})

    def on_delta(self, delta: TokenDelta) -> None:
        self.on_accept()
        self._n_tokens += len(delta.token_ids)
        if delta.end is None:
            if not self._is_due:
                self._is_due = True
                self._caller.later(self._count_new)
            return
        self._count_new()
        self._has_ended = True
        usage, timings = delta.end.usage, delta.end.timings
        counts: UsageCounts = {
            "completion_tokens": usage.completion_tokens - self._n_tokens,
            "compute_s": timings.compute_s,
            "queue_s": timings.queue_s,
            "first_token_s": timings.first_token_s,
            "joules": timings.joules or 0.0,
        }
        if self._counts_prompt:
            counts["prompt_tokens"] = usage.prompt_tokens - self._n_prompt
            counts["cached_tokens"] = usage.cached_tokens
        self._count(counts | _OUTCOMES.get(delta.end.reason, {"completed": 1}))
        if self._caller.observer is not None:
            self._caller.observer.on_answer(self._model, self._request, delta.end, self._prepared)

    def on_close(self, error: BaseException | None) -> None:
        """Note that nothing more comes: because of this error, or as the client left. Idempotent."""
        if self._has_ended:
            return
        self._count_new()
        self._has_ended = True
        reason = FinishReason.ERROR if isinstance(error, Exception) else FinishReason.ABORT
        self._count(_OUTCOMES[reason] if self.is_accepted else {"refused": 1})

    def _count_new(self) -> None:
        n_new, self._n_counted = self._n_tokens - self._n_counted, self._n_tokens
        self._is_due = False
        if n_new:
            self._caller.charge(n_new)
            self._count({"completion_tokens": n_new})

    def _count(self, counts: UsageCounts) -> None:
        self._caller.count(self._model, counts)


class Deltas:
    """The deltas of several requests as they come, each with its request's index, up to all ends.

    An async iterator for one reader, in one event loop. When anything fails, or the reader is cancelled,
    all requests end.
    """

    def __init__(
        self,
        streams: Sequence[AsyncGenerator[Accepted | TokenDelta]],
        meters: Sequence[RequestMeter],
    ) -> None:
        """`meters` count what is read of each stream."""
        self._streams, self._meters = streams, meters
        self._caller = request_context.current()
        self._open = set(range(len(streams)))
        """The requests whose end has not come."""
        self._early: deque[tuple[int, TokenDelta]] = deque()
        """The deltas that came before all requests were accepted."""
        self._arrived: asyncio.Queue[tuple[int, Accepted | TokenDelta | Exception]] = asyncio.Queue(
            1
        )
        self._readers: list[asyncio.Task[None]] = []
        if len(streams) > 1:
            self._readers = [asyncio.create_task(self._read(i)) for i in self._open]

    async def wait_until_accepted(self) -> None:
        """Wait until all requests are accepted, or end. Raises CorralError."""
        refusable = set(self._open)
        while refusable:
            index, item = await self._next()
            refusable.discard(index)
            if isinstance(item, TokenDelta):
                self._early.append((index, item))

    def __aiter__(self) -> Deltas:
        return self

    async def __anext__(self) -> tuple[int, TokenDelta]:
        while self._early or self._open:
            if self._early:
                await asyncio.sleep(0)  # others have their turns, as between deltas that come
            index, item = self._early.popleft() if self._early else await self._next()
            if isinstance(item, TokenDelta):
                self._meters[index].on_delta(item)
                return index, item
        await self.aclose()
        raise StopAsyncIteration

    async def aclose(self, error: BaseException | None = None) -> None:
        """End all requests, because of this error if there is one. Idempotent."""
        self._open.clear()
        for meter in self._meters:
            meter.on_close(error)
        has_left = not isinstance(error, Exception)
        if has_left and not any(meter.is_accepted for meter in self._meters):
            self._caller.give_back()
        self._caller.settle()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()

    async def _next(self) -> tuple[int, Accepted | TokenDelta]:
        try:
            index, item = await self._arrived.get() if self._readers else (0, await self._item(0))
            if isinstance(item, Exception):
                raise item
        except BaseException as error:
            await self.aclose(error)
            raise
        if isinstance(item, Accepted):
            self._meters[index].on_accept()
            self._caller.accepted.append(item)
        elif item.end is not None:
            self._open.discard(index)
        return index, item

    async def _item(self, index: int) -> Accepted | TokenDelta:
        try:
            return await anext(self._streams[index])
        except StopAsyncIteration:
            raise CorralError("The engine's stream ended without an end.") from None

    async def _read(self, index: int) -> None:
        """Read one of several streams. Deltas that come before its last item was taken pile up as one."""
        try:
            item = None
            while not (isinstance(item, TokenDelta) and item.end is not None):
                item = await self._item(index)
                await self._arrived.put((index, item))
        except Exception as error:
            await self._arrived.put((index, error))


def output_parser(model: ServedModel, chat: Chat, *, in_pieces: bool = True) -> OutputParser:
    """The parser of one answer to this chat. In streams, calls come in pieces, if no tool takes a text that
    its arguments must be read for."""
    in_pieces = in_pieces and chat.generation.stream and not chat.custom_tools
    return model.tokenizer.output_parser(chat.prompt, chat.tools, chat.thinks, in_pieces=in_pieces)


def parts(parser: OutputParser, delta: TokenDelta) -> list[Part]:
    """The parts of the delta's text that are certain now; none is empty."""
    certain = parser.feed(delta.text)
    return certain if delta.end is None else certain + parser.finish()
