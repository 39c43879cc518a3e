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
)
from serve_app.types import GenerationRequest

if TYPE_CHECKING:
    from serve_app.ingress.responses.actor import RayStore

    ResponseStore = Store | RayStore
else:
    ResponseStore = Store

logger = logging.getLogger("corral.ingress")

TELL_S, ALIVE_S = 0.25, 2.0
"""The least and the most seconds between two appends to the log of a response that nobody reads. An append
is a sign of life."""
WAIT_S = 20.0
"""The longest time that one question to the store waits for news."""
_PAUSE_S = 1.0
PUT_S = 0.5
"""The longest time that a store which does not answer holds an answer up."""


class BackgroundResponse:
    """A response that this ingress makes."""

    def __init__(
        self, stored_request: StoredRequest, owner: Owner, entries: list[Event], turn: int = 0
    ) -> None:
        self.stored_request = stored_request
        self.owner = owner
        self.entries = entries
        self.turn = turn
        self.n_told = len(entries)
        self.told_at = time.monotonic()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what the engine refuses it with."""
        self.task: asyncio.Task[None]
        self.is_read = False

    def fail(self, error: CorralError) -> None:
        """End it, or refuse it if it has not begun."""
        if self.accepted.done():
            self.entries.append(Event(time.time(), error=error))
        else:
            self.accepted.set_exception(error)
            self.accepted.exception()  # where nobody waits for it, nobody is warned

    def is_due(self, now: float) -> bool:
        if self.task.done() or now - self.told_at >= ALIVE_S:
            return True
        has_news = len(self.entries) > self.n_told
        return has_news and (self.is_read or now - self.told_at >= TELL_S)

    def log(self, first: int = 0) -> LogAppend:
        new = self.entries[first:]
        has_ended = bool(new) and new[-1].is_last
        pack = packed(new) if new else b""
        return LogAppend(self.stored_request.id, self.turn, first, pack, len(new), has_ended)


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
        response = BackgroundResponse(stored_request, owner, [])
        response.is_read = is_read
        with ExitStack() as held:
            held.enter_context(self.open_requests.entered(caller.holder))
            try:
                await self._store.put(owner, stored_request.packed(), response.log())
            except ConnectionError:
                raise EngineUnavailableError("Responses cannot be kept now.") from None
            held.enter_context(caller.handed_over())
            self._begin(response, caller, held.pop_all())
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
        logger.warning(
            "%s continues in this ingress, after %d entries", stored_request.id, stored.n_entries
        )
        entries = [entry async for part in self._parts(stored) for entry in part]
        response = BackgroundResponse(stored_request, stored.owner, entries, stored.turn)
        caller = Caller(request_id=stored_request.request.http_id, is_operator=False)
        if self.counter is not None:
            caller.counter = self.counter(stored.owner.key or "", "/v1/responses")
        self._begin(response, caller, ExitStack())

    def _begin(self, response: BackgroundResponse, caller: Caller, held: ExitStack) -> None:
        self._responses[response.stored_request.id] = response
        response.task = _aside(self._make(response, caller, held))
        if self._telling is None or self._telling.done():
            self._telling = _aside(self._tell_on())

    async def _make(self, response: BackgroundResponse, caller: Caller, held: ExitStack) -> None:
        request_context.enter(caller)
        try:
            with held:
                await self._generate(response)
        except asyncio.CancelledError:
            if not (response.entries and response.entries[-1].is_last):
                response.entries.append(Event(time.time()))
        except CorralError as error:
            response.fail(error)
        except Exception:
            logger.exception("%s failed", response.stored_request.id)
            response.fail(unexpected())
        finally:
            self._news.set()

    async def _generate(self, response: BackgroundResponse) -> None:
        model = find(self.models, response.stored_request.model)
        request = response.stored_request.request
        if response.turn:
            told = (entry.delta for entry in response.entries if entry.delta is not None)
            tokens = tuple(token for delta in told for token in delta.token_ids)
            request = continued(request, tokens, response.turn)
            response.accepted.set_result(None)
        async with aclosing(await _started(model, request, patiently=response.turn > 0)) as deltas:
            if not response.accepted.done():
                response.accepted.set_result(None)
            async for _, delta in deltas:
                response.entries.append(Event(time.time(), delta))
                if response.is_read:
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
        now = time.monotonic()
        due = [response for response in self._responses.values() if response.is_due(now)]
        appends = [response.log(response.n_told) for response in due]
        results = await self._store.append(appends) if appends else []
        for response, append, result in zip(due, appends, results, strict=True):
            response.n_told, response.told_at = append.first + append.n, now
            response.is_read = result is AppendResult.HURRY
            if result in (AppendResult.CANCEL, AppendResult.LEAVE):
                response.task.cancel()
            is_told = response.task.done() and response.n_told == len(response.entries)
            if is_told or result is AppendResult.LEAVE:
                self._responses.pop(append.id, None)

    async def _put_again(self) -> None:
        """The store was lost: a new one gets all that this ingress has."""
        logger.warning("The kept responses were lost. Those that still run are kept again.")
        for response in list(self._responses.values()):
            whole = response.log()
            try:
                await self._store.put(response.owner, response.stored_request.packed(), whole)
                response.n_told = whole.n
            except ConnectionError:
                await asyncio.sleep(_PAUSE_S)
                return
            except CorralError:
                logger.exception("%s could not be kept again", response.stored_request.id)

    def prepare(self) -> None:
        self._preparing = _aside(self._prepare())

    async def _prepare(self) -> None:
        try:
            await self._store.prepare()
        except Exception:
            logger.exception("The store of responses cannot be started")

    async def keep(self, stored_request: StoredRequest, owner: Owner, entries: list[Event]) -> None:
        """Keep a complete response. Waits a moment at most, and raises nothing: it was answered."""
        response = BackgroundResponse(stored_request, owner, entries)
        putting = self._putting[stored_request.id] = _aside(self._keep(response))
        await asyncio.wait([putting], timeout=PUT_S)

    async def _keep(self, response: BackgroundResponse) -> None:
        try:
            packed_request = response.stored_request.packed()
            await self._store.put(response.owner, packed_request, response.log())
        except Exception as error:
            logger.warning("%s is not kept: %s", response.stored_request.id, error)
        self._putting.pop(response.stored_request.id, None)

    async def find(
        self, response_id: str, key: str | None, since: int = 0, wait_s: float = 0.0
    ) -> StoredResponse:
        """A response of this key's, its log from that place on. Waits for so many seconds until there is
        something, or the end. Raises ResponseNotFoundError."""
        await self._settled(response_id)
        try:
            stored = await self._store.find(response_id, key, since, wait_s)
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
        """A response's entries, up to the last one. Ends early if it is deleted."""
        since = 0
        while True:
            try:
                stored = await self.find(response_id, key, since, WAIT_S)
            except ResponseNotFoundError:
                if response_id not in self._responses:
                    return
                await asyncio.sleep(_PAUSE_S)  # the store is lost, and gets it again
                continue
            async for part in self._parts(stored, since):
                for entry in part:
                    since += 1
                    yield entry
            if stored.has_ended and since >= stored.n_entries:
                return

    async def _parts(
        self, stored: StoredResponse, since: int = 0
    ) -> AsyncGenerator[Sequence[Event]]:
        """The log from that place on. Between its parts, all others on the event loop have their turn, and
        one log is read at a time: who reads many long ones holds up no stream for longer."""
        parts = stored.parts(since)
        while True:
            async with self._reading:
                part = next(parts, None)
                if part is None:
                    return
                await asyncio.sleep(0)
            yield part

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
