"""The responses that this ingress makes and that go on when their clients leave; and what is read of all.

Each one's log goes to the store a few times a second. All are read from the store, by any ingress. If this
ingress ends, those that it makes have failed.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from serve_app.apis.responses.store import (
    LEASE_S,
    Event,
    LogAppend,
    Owner,
    ResponseStore,
    StoredRequest,
    StoredResponse,
    item_prefix,
    pack_events,
    prefix_in,
    unpack_events,
)
from serve_app.base.errors import CorralError, EngineUnavailableError, ResponseNotFoundError
from serve_app.base.values.requests import GenerationRequest
from serve_app.server.access.turnstile import OpenRequests
from serve_app.server.answering import streaming
from serve_app.server.http import request_context
from serve_app.server.http.errors import unexpected_error
from serve_app.server.http.request_context import Caller
from serve_app.server.model_registry import ServedModel

logger = logging.getLogger("corral.ingress")

TELL_S = 0.2
"""The seconds between two appends to the logs of the responses that are being made. An append is a sign of
life."""
_PAUSE_S = 1.0
PUT_S = 0.5
"""The longest time that a store which does not answer holds an answer up."""


class BackgroundResponse:
    """A response that this ingress makes."""

    def __init__(self, response_id: str, caller: Caller) -> None:
        self.id, self.caller = response_id, caller
        self.n_told = 0
        """The chunks that the store has."""
        self._untold: list[bytes] = []
        self._new: list[Event] = []
        """The events that are in no chunk yet."""
        self._has_ended = False
        self._told_at = time.monotonic()
        """The time when the last event was added."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what the engine refuses it with."""
        self.task: asyncio.Task[None]

    def add(self, event: Event) -> None:
        """Add an event to the log, unless that has its last one."""
        if not self._has_ended:
            self._new.append(event)
            self._has_ended = event.is_last
            self._told_at = time.monotonic()

    def add_wait(self, interval_s: float) -> None:
        """Add an event for those who follow it, if it runs and had none for so long."""
        waited_s = time.monotonic() - self._told_at
        if self.accepted.done() and 0 < interval_s <= waited_s:
            self.add(Event.wait())

    def fail(self, error: CorralError) -> None:
        """End it, or refuse it if it has not begun."""
        if self.accepted.done():
            self.add(Event(time.time(), error=error))
        else:
            self.accepted.set_exception(error)
            self.accepted.exception()  # where nobody waits for it, nobody is warned

    def news(self) -> LogAppend:
        """The events that the store does not have."""
        self._untold += pack_events(self._new)
        self._new.clear()
        return LogAppend(self.id, self.n_told, self._untold, self._has_ended)

    def on_stored(self, n_chunks: int) -> None:
        """Note that the store has so many more."""
        self.n_told += n_chunks
        self._untold = self._untold[n_chunks:]


class BackgroundResponses:
    """The responses in the background of one ingress. For its event loop."""

    def __init__(
        self,
        store: ResponseStore,
        open_requests: OpenRequests,
        kept_s: float,
        wait_interval_s: float,
    ) -> None:
        """`kept_s`: the seconds that responses are kept after their ends; 0 keeps none. Who follows one is
        told to wait after so many silent seconds; 0 and less: never."""
        self.open_requests = open_requests
        self._store, self._kept_s, self._wait_interval_s = store, kept_s, wait_interval_s
        self._responses: dict[str, BackgroundResponse] = {}
        self._telling: asyncio.Task[None] | None = None
        self._putting: dict[str, asyncio.Task[None]] = {}
        """Complete ones on their way to the store."""
        self._reading = asyncio.Lock()
        self._preparing: asyncio.Task[None] | None = None

    @property
    def keep_any(self) -> bool:
        return self._kept_s > 0

    async def start(
        self,
        model: ServedModel,
        request: GenerationRequest,
        stored_request: StoredRequest,
        owner: Owner,
    ) -> None:
        """Make a response for this task's caller; it goes on when that one leaves. Returns when an engine
        has accepted it. Raises CorralError."""
        caller = request_context.current()
        response = BackgroundResponse(request.id, caller)
        with ExitStack() as places:
            places.enter_context(self.open_requests.count(caller.holder))
            try:
                await self._put(owner, stored_request, response.news())
            except ConnectionError:
                raise EngineUnavailableError("Responses cannot be kept now.") from None
            places.enter_context(caller.handed_over())
            response.task = _aside(self._make(response, model, request))
            taken = places.pop_all()
        response.task.add_done_callback(lambda _: taken.close())
        self._responses[request.id] = response
        if self._telling is None or self._telling.done():
            self._telling = _aside(self._tell_on())
        try:
            await asyncio.shield(response.accepted)
        except BaseException:  # refused, or its client has left without its id
            response.task.cancel()
            self._responses.pop(request.id, None)
            await self._store.delete(request.id, owner.key)
            raise

    async def _make(
        self, response: BackgroundResponse, model: ServedModel, request: GenerationRequest
    ) -> None:
        request_context.enter(response.caller)
        try:
            async with aclosing(await streaming.start(model, [request])) as deltas:
                response.accepted.set_result(None)
                async for _, delta in deltas:
                    response.add(Event(time.time(), delta))
        except CorralError as error:
            response.fail(error)
        except Exception:
            logger.exception("%s failed", response.id)
            response.fail(unexpected_error())

    async def _tell_on(self) -> None:
        """Tell the store, as long as there are some."""
        while self._responses:
            await asyncio.sleep(TELL_S)
            try:
                await self._tell()
            except Exception as error:
                logger.warning("The store of responses could not be told what is new: %r", error)
                await asyncio.sleep(_PAUSE_S)

    async def _tell(self) -> None:
        responses = list(self._responses.values())
        for response in responses:
            response.add_wait(self._wait_interval_s)
        appends = [response.news() for response in responses]
        go_on = await self._store.append(appends)
        for response, append, goes_on in zip(responses, appends, go_on, strict=True):
            response.on_stored(len(append.chunks))
            if not goes_on:
                response.fail(EngineUnavailableError("This response is not kept any more."))
                response.task.cancel()
            if append.has_ended or not goes_on:
                self._responses.pop(append.id, None)

    async def drain(self) -> None:
        """Return when those that this ingress makes have ended, if others can read them then."""
        if self._store.is_shared and self._telling is not None:
            await self._telling

    def prepare(self) -> None:
        """Have the store started, for a response that will be kept."""
        self._preparing = _aside(self._store.prepare())

    async def keep(self, stored_request: StoredRequest, owner: Owner, events: list[Event]) -> None:
        """Keep a complete response. Waits a moment at most, and raises nothing: it was answered."""
        log = LogAppend(stored_request.id, 0, pack_events(events), has_ended=True)
        putting = _aside(self._keep(owner, stored_request, log))
        self._putting[stored_request.id] = putting
        await asyncio.wait([putting], timeout=PUT_S)

    async def _keep(self, owner: Owner, stored_request: StoredRequest, log: LogAppend) -> None:
        try:
            await self._put(owner, stored_request, log)
        except Exception as error:
            logger.warning("%s is not kept: %s", log.id, error)
        self._putting.pop(log.id, None)

    async def _put(self, owner: Owner, stored_request: StoredRequest, log: LogAppend) -> None:
        packed, item_ids = stored_request.pack(), stored_request.item_ids
        await self._store.put(owner, packed, log, self._kept_s, item_ids)

    async def find(
        self, response_id: str, key: str | None, first: int = 0, wait_s: float = 0.0
    ) -> StoredResponse:
        """A response of this key's, its log from that chunk on. Waits for so many seconds until there is
        something, or the end. Raises ResponseNotFoundError."""
        await self._wait_until_put(response_id)
        stored = await self._store.find(response_id, key, first, wait_s)
        if stored is None:
            raise ResponseNotFoundError(response_id)
        return stored

    async def find_items(self, item_ids: Sequence[str], key: str | None) -> list[StoredResponse]:
        """Responses of this key's with these items, from the last item on up to one that is not kept.
        Raises KeyLimitError."""
        prefixes = set(map(prefix_in, item_ids)) if self._putting else ()
        for name in [name for name in self._putting if item_prefix(name) in prefixes]:
            await self._wait_until_put(name)
        return await self._store.find_items(item_ids, key) or []

    async def _wait_until_put(self, response_id: str) -> None:
        """Return when the response is not on its way to the store."""
        putting = self._putting.get(response_id)
        if putting is not None:
            await asyncio.wait([putting])

    async def follow(self, response_id: str, key: str | None) -> AsyncGenerator[Event]:
        """A response's events, up to the last one. Raises ResponseNotFoundError, also if it is deleted
        meanwhile."""
        n_chunks, has_ended = 0, False
        while not has_ended:
            stored = await self.find(response_id, key, n_chunks, LEASE_S)
            async for event in self._events(stored):
                yield event
            n_chunks += len(stored.chunks)
            has_ended = stored.has_ended

    async def _events(self, stored: StoredResponse) -> AsyncGenerator[Event]:
        """The events of a log. Between its chunks, all others on the event loop have their turn. One chunk
        is read at a time: who reads many long ones holds up no stream."""
        for chunk in stored.chunks:
            async with self._reading:
                events = unpack_events(chunk)
                await asyncio.sleep(0)
            for event in events:
                yield event

    async def cancel(self, response_id: str, key: str | None) -> None:
        """End a response, unless it has ended. Its making ends soon."""
        await self._store.cancel(response_id, key)

    async def delete(self, response_id: str, key: str | None) -> None:
        """Forget a response; its making ends soon. Raises ResponseNotFoundError."""
        await self._wait_until_put(response_id)  # else it would be kept after this
        if not await self._store.delete(response_id, key):
            raise ResponseNotFoundError(response_id)


def _aside(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task in a context of its own: Serve cancels what a request has called when its client leaves."""
    return asyncio.create_task(work, context=contextvars.Context())
