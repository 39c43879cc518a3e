"""The responses that this ingress makes and that go on when their clients leave; and what is read of all.

Each one's log goes to the store a few times a second, and at once while somebody reads it. If this ingress
ends, another one goes on from there. So all are read from the store: nobody is shown what it does not know.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from serve_app.errors import (
    CorralError,
    EngineUnavailableError,
    QueueFullError,
    ResponseNotFoundError,
)
from serve_app.ingress.access.turnstile import OpenRequests
from serve_app.ingress.generation import generation
from serve_app.ingress.generation.failover import continued
from serve_app.ingress.http import request_context
from serve_app.ingress.http.errors import unexpected
from serve_app.ingress.http.request_context import Caller, UsageCounts
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.responses.store import (
    ABANDONED_S,
    AppendResult,
    Event,
    LogAppend,
    Owner,
    Store,
    StoredRequest,
    StoredResponse,
    packed,
    unpacked,
)
from serve_app.types import GenerationRequest

if TYPE_CHECKING:
    from serve_app.ingress.responses.actor import RayStore

    ResponseStore = Store | RayStore
else:
    ResponseStore = Store

logger = logging.getLogger("corral.ingress")

TELL_S = 0.25
"""The most seconds between two appends to the logs of the responses that are being made. An append is a
sign of life."""
WAIT_S = 20.0
"""The longest time that one question to the store waits for news."""
_PAUSE_S = 1.0
PUT_S = 0.5
"""The longest time that a store which does not answer holds an answer up."""


class BackgroundResponse:
    """A response that this ingress makes."""

    def __init__(
        self,
        stored_request: StoredRequest,
        owner: Owner,
        caller: Caller,
        chunks: Sequence[bytes] = (),
        turn: int = 0,
    ) -> None:
        """`chunks` are the log that another ingress has made of it."""
        self.stored_request, self.owner, self.turn = stored_request, owner, turn
        self.caller = caller
        self.held = ExitStack()
        """Is closed when it is made."""
        self._chunks = list(chunks)
        self.n_told = len(self._chunks)
        """The chunks that the store has."""
        self._new: list[Event] = []
        """The events that are in no chunk yet."""
        self._has_ended = False
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what the engine refuses it with."""
        self.task: asyncio.Task[None]
        self.is_read = False

    def add(self, event: Event) -> None:
        """Add an event to the log, unless that has its last one."""
        if not self._has_ended:
            self._new.append(event)
            self._has_ended = event.is_last

    def fail(self, error: CorralError) -> None:
        """End it, or refuse it if it has not begun."""
        if self.accepted.done():
            self.add(Event(time.time(), error=error))
        else:
            self.accepted.set_exception(error)
            self.accepted.exception()  # where nobody waits for it, nobody is warned

    def log(self, first: int = 0) -> LogAppend:
        self._chunks += packed(self._new)
        self._new.clear()
        chunks = self._chunks[first:]
        return LogAppend(self.stored_request.id, self.turn, first, chunks, self._has_ended)


class BackgroundResponses:
    """All of them in one ingress. For its event loop."""

    def __init__(
        self, models: Mapping[str, ServedModel], store: ResponseStore, open_requests: OpenRequests
    ) -> None:
        self.models = models
        self.open_requests = open_requests
        self.counter: Callable[[str, str], Callable[[str, UsageCounts], float]] | None = None
        """Makes what counts for a key (empty without keys), at an endpoint."""
        self._store = store
        self._responses: dict[str, BackgroundResponse] = {}
        self._telling: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        """There is something new of a response that somebody reads."""
        self._putting: dict[str, asyncio.Task[None]] = {}
        """Complete ones on their way to the store."""
        self._reading = asyncio.Lock()
        self._preparing: asyncio.Task[None] | None = None

    @property
    def keep_any(self) -> bool:
        return self._store.keeps_any

    async def start(
        self, stored_request: StoredRequest, owner: Owner, *, is_read: bool
    ) -> BackgroundResponse:
        """Make a response for this task's caller; it goes on when that one leaves. Returns when an engine
        has accepted it. Raises CorralError."""
        caller = request_context.current()
        response = BackgroundResponse(stored_request, owner, caller)
        response.is_read = is_read
        with ExitStack() as held:
            held.enter_context(self.open_requests.entered(caller.holder))
            try:
                await self._store.put(owner, stored_request.packed(), response.log())
            except ConnectionError:
                raise EngineUnavailableError("Responses cannot be kept now.") from None
            held.enter_context(caller.handed_over())
            response.held = held.pop_all()
            self._begin(response, stored_request.request)
        try:
            await asyncio.shield(response.accepted)
        except BaseException:  # refused, or its client has left without its id
            response.task.cancel()
            self._responses.pop(stored_request.id, None)
            with suppress(ConnectionError):
                await self._store.delete(stored_request.id, owner.key)
            raise
        return response

    async def adopt(self) -> int:
        """Go on with the responses whose ingresses are gone. Returns how many. Tokens generated from here
        on are counted, and charged to no limit: this ingress has not seen the owner."""
        n_adopted = 0
        with suppress(ConnectionError):
            while self.keep_any and (stored := await self._store.adopt()) is not None:
                await self._go_on(stored)
                n_adopted += 1
        return n_adopted

    async def _go_on(self, stored: StoredResponse) -> None:
        stored_request = StoredRequest.unpacked(stored.stored_request)
        if (silent := self._responses.get(stored_request.id)) is not None:
            silent.task.cancel()
        logger.warning("%s continues in this ingress", stored_request.id)
        caller = Caller(request_id=stored_request.request.http_id, is_operator=False)
        if self.counter is not None:
            caller.counter = self.counter(stored.owner.key or "", "/v1/responses")
        known = stored.chunks, stored.turn
        response = BackgroundResponse(stored_request, stored.owner, caller, *known)
        events = [event async for event in self._events(stored)]
        tokens = (event.delta.token_ids for event in events if event.delta is not None)
        request = continued(stored_request.request, tuple(chain(*tokens)), stored.turn)
        response.accepted.set_result(None)
        self._begin(response, request)

    def _begin(self, response: BackgroundResponse, request: GenerationRequest) -> None:
        self._responses[response.stored_request.id] = response
        response.task = _aside(self._make(response, request))
        if self._telling is None or self._telling.done():
            self._telling = _aside(self._tell_on())

    async def _make(self, response: BackgroundResponse, request: GenerationRequest) -> None:
        request_context.enter(response.caller)
        try:
            with response.held:
                model = find(self.models, response.stored_request.model)
                deltas = await _started(model, request, patiently=response.turn > 0)
                async with aclosing(deltas):
                    if not response.accepted.done():
                        response.accepted.set_result(None)
                    async for _, delta in deltas:
                        response.add(Event(time.time(), delta))
                        if response.is_read:
                            self._news.set()
        except asyncio.CancelledError:
            response.add(Event(time.time()))
        except CorralError as error:
            response.fail(error)
        except Exception:
            logger.exception("%s failed", response.stored_request.id)
            response.fail(unexpected())
        finally:
            self._news.set()

    async def _tell_on(self) -> None:
        """Tell the store, as long as there are some."""
        while self._responses:
            with suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    await self._news.wait()
            self._news.clear()
            try:
                await self._tell()
            except ConnectionError:
                await self._put_again()
            except Exception:
                logger.exception("The store of responses could not be told what is new")
                await asyncio.sleep(_PAUSE_S)

    async def _tell(self) -> None:
        responses = list(self._responses.values())
        are_made = [response.task.done() for response in responses]
        appends = [response.log(response.n_told) for response in responses]
        results = await self._store.append(appends)
        for response, is_made, append, result in zip(
            responses, are_made, appends, results, strict=True
        ):
            response.n_told = append.first + len(append.chunks)
            response.is_read = result is AppendResult.HURRY
            if result in (AppendResult.CANCEL, AppendResult.LEAVE):
                response.task.cancel()
            if is_made or result is AppendResult.LEAVE:
                self._responses.pop(append.id, None)

    async def _put_again(self) -> None:
        """The store was lost: a new one gets all that this ingress has."""
        logger.warning("The kept responses were lost. Those that still run are kept again.")
        for response in list(self._responses.values()):
            whole = response.log()
            try:
                await self._store.put(response.owner, response.stored_request.packed(), whole)
                response.n_told = len(whole.chunks)
            except ConnectionError:
                await asyncio.sleep(_PAUSE_S)
                return
            except CorralError:
                logger.exception("%s could not be kept again", response.stored_request.id)

    def prepare(self) -> None:
        """Have the store started, for a response that will be kept."""
        self._preparing = _aside(self._store.prepare())

    async def keep(self, stored_request: StoredRequest, owner: Owner, events: list[Event]) -> None:
        """Keep a complete response. Waits a moment at most, and raises nothing: it was answered."""
        log = LogAppend(stored_request.id, 0, 0, packed(events), has_ended=True)
        putting = _aside(self._keep(owner, stored_request.packed(), log))
        self._putting[stored_request.id] = putting
        await asyncio.wait([putting], timeout=PUT_S)

    async def _keep(self, owner: Owner, packed_request: bytes, log: LogAppend) -> None:
        try:
            await self._store.put(owner, packed_request, log)
        except Exception as error:
            logger.warning("%s is not kept: %s", log.id, error)
        self._putting.pop(log.id, None)

    async def find(
        self, response_id: str, key: str | None, first: int = 0, wait_s: float = 0.0
    ) -> StoredResponse:
        """A response of this key's, its log from that chunk on. Waits for so many seconds until there is
        something, or the end. Raises ResponseNotFoundError."""
        await self._settled(response_id)
        try:
            stored = await self._store.find(response_id, key, first, wait_s)
        except ConnectionError:
            stored = None
        if stored is None:
            raise ResponseNotFoundError(response_id)
        return stored

    async def _settled(self, response_id: str) -> None:
        """Return when the response is not on its way to the store."""
        putting = self._putting.get(response_id)
        if putting is not None:
            await asyncio.wait([putting])

    async def follow(self, response_id: str, key: str | None) -> AsyncGenerator[Event]:
        """A response's events, up to the last one. Ends early if it is deleted."""
        n_chunks = 0
        while True:
            try:
                stored = await self.find(response_id, key, n_chunks, WAIT_S)
            except ResponseNotFoundError:
                if response_id not in self._responses:
                    return
                await asyncio.sleep(_PAUSE_S)  # the store is lost, and gets it again
                continue
            async for event in self._events(stored):
                yield event
            n_chunks += len(stored.chunks)
            if stored.has_ended:
                return

    async def _events(self, stored: StoredResponse) -> AsyncGenerator[Event]:
        """The events of a log. Between its chunks, all others on the event loop have their turn, and one
        chunk is read at a time: who reads many long ones holds up no stream for longer."""
        for chunk in stored.chunks:
            async with self._reading:
                events = unpacked(chunk)
                await asyncio.sleep(0)
            for event in events:
                yield event

    async def cancel(self, response_id: str, key: str | None) -> None:
        """Have the making of a response end. Its log tells when it has."""
        response = self._responses.get(response_id)
        if response is not None and response.owner.key == key:
            response.task.cancel()
            return
        with suppress(ConnectionError):
            await self._store.cancel(response_id, key)

    async def delete(self, response_id: str, key: str | None) -> None:
        """Forget a response; its making ends. Raises ResponseNotFoundError."""
        await self._settled(response_id)  # else it would be kept after this
        was_kept = False
        with suppress(ConnectionError):
            was_kept = await self._store.delete(response_id, key)
        response = self._responses.get(response_id)
        if response is not None and response.owner.key == key:
            del self._responses[response_id]
            response.task.cancel()
        elif not was_kept:
            raise ResponseNotFoundError(response_id)


def _aside(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task in a context of its own: Serve cancels what a request has called when its client leaves."""
    return asyncio.create_task(work, context=contextvars.Context())


async def _started(
    model: ServedModel, request: GenerationRequest, *, patiently: bool
) -> generation.Deltas:
    """Start the request; where an ingress was lost, engines may be, too, and are waited for."""
    give_up_at = time.monotonic() + (ABANDONED_S if patiently else 0.0)
    while True:
        try:
            return await generation.start(model, [request])
        except (EngineUnavailableError, QueueFullError):
            if time.monotonic() >= give_up_at:
                raise
        await asyncio.sleep(_PAUSE_S)
