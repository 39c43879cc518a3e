"""An ingress's way to the engines of one model: a client behind a handle of its replicas."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.base.errors import (
    CorralError,
    EngineFailedError,
    EngineUnavailableError,
    ModelLoadingError,
)
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.media import Medium, Size
from serve_app.base.values.replicas import (
    Asleep,
    FetchingReplica,
    ReplicaStats,
    RequestRecord,
    SlotAction,
)
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel import routing_reports as reports
from serve_app.channel.handle import ReplicaCall, ReplicaHandle
from serve_app.channel.listener import IncomingCall, Listener
from serve_app.config.sources import AdapterConfig
from serve_app.server.adapters import AdapterControl
from serve_app.server.answering.failover import retry, unbroken
from serve_app.server.model_registry import Answers
from serve_app.server.shared_looks import SharedLooks
from serve_app.server.workers.fair_semaphore import FairSemaphore

_STATS_TIMEOUT_S = 2.0
_SLOT_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.1
"""However many ask, replicas are asked the same once in so many seconds at most."""
_STARTING, _STARTING_EACH = 16, 8
"""Requests that may be on their way to an engine at once, in all and of each client. Each takes
milliseconds of the event loop. Another client's is sent between those of a burst."""
MOST_LOAD_S = 120.0
"""The longest time that a request waits for a model that is not loaded."""
_LATE_S = 10.0
"""The end of an answer comes at most so long after the call has ended, or never."""


class HandleClient:
    """The EngineClient of one model's engines behind a handle. Used in the ingress's event loop."""

    def __init__(
        self,
        handle: ReplicaHandle,
        vocabulary_key: bytes,
        listener: Listener,
        model_id: str,
        adapters: AdapterControl,
        *,
        is_on_demand: bool = False,
    ) -> None:
        """`vocabulary_key` is of the vocabulary that its requests' tokens are of; the answers' come to the
        listener."""
        self._is_on_demand = is_on_demand
        self._model_id, self._adapters = model_id, adapters
        self._load_s: float | None = None
        """The seconds that the last loading took."""
        self._handle = handle
        self._vocabulary_key = vocabulary_key
        self._listener = listener
        self._stats = SharedLooks(lambda _: self._ask_all("stats"), _LOOK_EVERY_S)
        self._fetching = SharedLooks(lambda _: handle.fetching(), _LOOK_EVERY_S)
        self._explained = SharedLooks(self._ask_explain, _LOOK_EVERY_S)
        self._states = SharedLooks(lambda _: handle.replica_states(), _LOOK_EVERY_S)
        self._starting = FairSemaphore(_STARTING, _STARTING_EACH)
        self._following: set[asyncio.Task[None]] = set()
        """The followers of calls. A complete answer's follower ends by itself, a moment later."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        """Run a request, on another replica if one is lost."""
        return unbroken(request, self._attempt)

    async def _attempt(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        address = await self._listener.address()
        following: asyncio.Task[None] | None = None
        with self._listener.call() as call:
            try:
                async with self._loading(), self._starting.place(request.account):
                    response = self._handle.call(
                        "generate", request, self._vocabulary_key, address, call.number
                    )
                    following = asyncio.create_task(_follow(response, call))
                    self._following.add(following)
                    following.add_done_callback(self._following.discard)
                    first = await anext(call)
                yield first
                async for item in call:
                    yield item
            finally:
                if following is not None and not call.has_ended:
                    following.cancel()
                    response.cancel()  # without a wait: whoever left may be cancelled at each one

    @asynccontextmanager
    async def _loading(self) -> AsyncIterator[None]:
        """Bounds how long something waits for the model, if it is not loaded. Raises ModelLoadingError."""
        if self.is_loaded:
            yield
            return
        began = time.monotonic()
        try:
            async with asyncio.timeout(MOST_LOAD_S):
                yield
        except TimeoutError:
            likely_s = MOST_LOAD_S if self._load_s is None else self._load_s
            raise ModelLoadingError(
                f"The model was not loaded within {MOST_LOAD_S:g} seconds. Loading goes on.",
                math.ceil(likely_s),
            ) from None
        self._load_s = time.monotonic() - began

    @property
    def failure(self) -> CorralError | None:
        return self._handle.failure

    @property
    def is_loaded(self) -> bool:
        running = self._handle.running()
        if self._is_on_demand:  # its replicas have channels while the model is loaded
            return any(reports.HERE.hears(one) for one in running)
        return bool(running)

    async def load(self) -> None:
        async with self._loading():
            _unwrap(await self._handle.call("is_there"))

    async def release(self) -> None:
        if not self._is_on_demand:
            return
        await self._handle.ask_all("release", timeout_s=_STATS_TIMEOUT_S)

    async def load_adapter(self, adapter: AdapterConfig) -> None:
        await self.load()
        await self._adapters.load(self._model_id, adapter, self._handle)

    async def unload_adapter(self, adapter_id: str) -> None:
        await self._adapters.unload(self._model_id, adapter_id, self._handle)

    async def embed(
        self,
        texts: tuple[tuple[int, ...], ...],
        client: str,
        *,
        background: bool = False,
        media: tuple[Medium, ...] = (),
    ) -> NDArray[np.float32]:
        arguments = texts, client, self._vocabulary_key, background, media
        async with self._loading():
            return await retry(lambda: self._embed_once(arguments))

    async def _embed_once(self, arguments: tuple[Any, ...]) -> NDArray[np.float32]:
        response = self._handle.call("embed", *arguments)
        try:
            vectors: NDArray[np.float32] = _unwrap(await response)
            return vectors
        finally:
            response.cancel()

    async def stats(self) -> Answers[ReplicaStats]:
        return await self._stats.ask()

    async def replica_states(self) -> dict[str, int]:
        """The number of replicas in each state. Nothing if that cannot be known in time."""
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                return await self._states.ask()
        except TimeoutError:
            return {}

    async def fetching(self) -> Sequence[FetchingReplica]:
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                return await self._fetching.ask()
        except Exception:  # Ray's head is away for a moment, or late
            return ()

    async def explain(self, request_id: str) -> Answers[RequestRecord]:
        return await self._explained.ask(request_id)

    async def _ask_explain(self, request_id: str) -> Answers[RequestRecord]:
        answers = await self._ask_all("explain", request_id)
        records = (record for answer in answers.found for record in answer.records)
        return Answers(tuple(records), answers.missing)

    async def media_tokens(self, sizes: Sequence[Size]) -> int:
        async with self._loading():
            n_tokens: int = _unwrap(await self._handle.call("media_tokens", sizes))
        return n_tokens

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction:
        arguments = "act_on_slot", replica_id, action, slot_id, name
        answer = _unwrap(await self._handle.ask_one(*arguments, timeout_s=_SLOT_TIMEOUT_S))
        if not isinstance(answer, SlotAction):
            raise EngineUnavailableError(f"The replica {replica_id} does not answer.")
        return answer

    async def _ask_all(self, method: str, *arguments: Any) -> Answers[Any]:
        """The answers, each with its `replica_id`; missing are replicas that ran all the time."""
        running = self._handle.running()
        answers = await self._handle.ask_all(method, *arguments, timeout_s=_STATS_TIMEOUT_S)
        running &= self._handle.running()
        missing = tuple(sorted(running - {answer.replica_id for answer in answers}))
        return Answers(
            tuple(answer for answer in answers if not isinstance(answer, Asleep)), missing
        )


def _unwrap(answer: Any) -> Any:
    """The answer of a replica, which returns the CorralErrors that it would raise."""
    if isinstance(answer, CorralError):
        raise answer
    return answer


async def _follow(response: ReplicaCall, call: IncomingCall) -> None:
    """Let the call fail if its request is refused or its replica is lost."""
    try:
        refusal: CorralError | None = await response
    except CorralError as error:
        refusal = error
    if refusal is None and not call.has_ended:
        await asyncio.sleep(_LATE_S)
    call.fail(refusal or EngineFailedError("The engine's stream ended without an end."))
