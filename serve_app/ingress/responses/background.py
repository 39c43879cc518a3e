"""The responses that this ingress makes and that go on when their clients leave; and what is read of all.

Each one's log goes to the store a few times a second, and at once while somebody reads it. If this
ingress ends, another one goes on from there. So nobody is shown what the store does not know.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any

from serve_app.errors import (
    CorralError,
    EngineUnavailableError,
    QueueFullError,
    ResponseNotFoundError,
)
from serve_app.ingress.access.limits.open_requests import OpenRequests
from serve_app.ingress.generation import generation
from serve_app.ingress.http import request_context
from serve_app.ingress.http.errors import unexpected
from serve_app.ingress.http.request_context import Caller
from serve_app.ingress.model_registry import ServedModel, find
from serve_app.ingress.responses import log
from serve_app.ingress.responses.log import Event, StoredRequest
from serve_app.ingress.responses.store import (
    ABANDONED_S,
    AppendResult,
    LogAppend,
    Owner,
    Store,
    StoredResponse,
)
from serve_app.types import GenerationRequest

if TYPE_CHECKING:
    from serve_app.ingress.responses.actor import RayStore

logger = logging.getLogger("corral.ingress")

TELL_S, ALIVE_S = 0.25, 2.0
"""The least and the most seconds between two appends to the log of a response that nobody reads. An append
is a sign of life."""
WAIT_S = 20.0
"""The longest time that one question to the store waits for news."""
_PAUSE_S = 1.0
_AT_ONCE = 32
"""After so many entries that were there already, others have their turn."""
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
        self.n_readable = len(entries)
        """An ingress that continues it has so many: the rest of the text would be another one."""
        self.n_readers = 0
        self.told_at = time.monotonic()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what the engine refuses it with."""
        self.task: asyncio.Task[None]
        self.is_left = False
        """Whether the store's log counts, and not this one."""
        self.is_over = False
        """Whether nothing will be added."""
        self._news = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether its log is complete."""
        return bool(self.entries) and self.entries[-1].is_last

    def add(self, entry: Event) -> None:
        """Something came of it. It can be read when it is kept."""
        self.entries.append(entry)

    def show(self, n: int) -> None:
        """So many entries can be read."""
        self.n_readable = n
        self.wake()

    def wake(self) -> None:
        """All who follow it."""
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, since: int) -> AsyncGenerator[Event]:
        """The entries from that place on, up to the last one, or until the store's count."""
        self.n_readers += 1
        try:
            while not self.is_left:
                while since < self.n_readable:
                    yield self.entries[since]
                    since += 1
                    if since % _AT_ONCE == 0:
                        await asyncio.sleep(0)
                if self.is_over and since >= len(self.entries):
                    return
                await self._news.wait()
        finally:
            self.n_readers -= 1

    def is_due(self, now: float) -> bool:
        """Whether the store should hear of it now."""
        if self.is_over or now - self.told_at >= ALIVE_S:
            return True
        has_news = len(self.entries) > self.n_told
        return has_news and (self.n_readers > 0 or now - self.told_at >= TELL_S)

    def unsaved(self) -> LogAppend:
        """The changes that the store does not have yet."""
        new = self.entries[self.n_told :]
        pack = log.packed(new) if new else b""
        ended = bool(new) and new[-1].is_last
        return LogAppend(self.stored_request.id, self.turn, self.n_told, pack, len(new), ended)

    def whole(self) -> LogAppend:
        """All of it."""
        pack = log.packed(self.entries)
        return LogAppend(
            self.stored_request.id, self.turn, 0, pack, len(self.entries), self.has_ended
        )


class BackgroundResponses:
    """All of them in one ingress. For its event loop."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        store: Store | RayStore,
        open_requests: OpenRequests,
    ) -> None:
        self.models = models
        self.open_requests = open_requests
        self._store = store
        self._responses: dict[str, BackgroundResponse] = {}
        self._telling: asyncio.Task[None] | None = None
        self._read = asyncio.Event()
        """There is something new of a response that somebody reads."""
        self._putting: dict[str, BackgroundResponse] = {}
        """Complete ones on their way to the store."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading = asyncio.Lock()

    @property
    def keep_any(self) -> bool:
        """Whether responses are kept at all."""
        return self._store.keeps_any

    async def start(self, stored_request: StoredRequest, owner: Owner) -> BackgroundResponse:
        """Make a response for this task's caller; it goes on when that one leaves. Returns when an engine
        has accepted it. Raises CorralError."""
        caller = request_context.current()
        response = BackgroundResponse(stored_request, owner, [])
        with ExitStack() as held:
            held.enter_context(self.open_requests.entered(caller.holder))
            try:
                await self._store.put(
                    stored_request.id, owner, stored_request.packed(), response.whole()
                )
            except ConnectionError:
                raise EngineUnavailableError("Responses cannot be kept now.") from None
            held.enter_context(caller.handed_over())
            self._begin(response, caller, held.pop_all())
        try:
            await asyncio.shield(response.accepted)
        except BaseException:  # refused, or its client has left without its id
            response.task.cancel()
            await self._forget(response)
            raise
        return response

    async def adopt(self, response_id: str) -> bool:
        """Go on with a response whose ingress is gone. Returns whether there is something to do.
        Tokens generated from here on are charged to no key: this ingress has not seen the owner."""
        try:
            stored = await self._store.adopt(response_id)
        except ConnectionError:
            return False
        if stored is None:
            return False
        stored_request = StoredRequest.unpacked(stored.stored_request)
        logger.warning(
            "%s continues in this ingress, after %d entries", stored_request.id, stored.n_entries
        )
        entries = [entry async for part in self._parts(stored) for entry in part]
        response = BackgroundResponse(stored_request, stored.owner, entries, stored.turn)
        caller = Caller(request_id=stored_request.request.http_id, is_operator=False)
        self._begin(response, caller, ExitStack())
        return True

    def _begin(self, response: BackgroundResponse, caller: Caller, held: ExitStack) -> None:
        self._responses[response.stored_request.id] = response
        # In a context of its own: Serve cancels what a request has called when its client leaves.
        making = self._make(response, caller, held)
        response.task = asyncio.create_task(making, context=contextvars.Context())
        if self._telling is None or self._telling.done():
            telling = self._tell_on()
            self._telling = asyncio.create_task(telling, context=contextvars.Context())

    async def _make(self, response: BackgroundResponse, caller: Caller, held: ExitStack) -> None:
        request_context.enter(caller)
        try:
            with held:
                await self._generate(response)
        except asyncio.CancelledError:
            if not response.has_ended:
                response.add(Event(None, time.time()))
        except CorralError as error:
            self._fail(response, error)
        except Exception:
            logger.exception("%s failed", response.stored_request.id)
            self._fail(response, unexpected())
        finally:
            response.is_over = True
            response.wake()

    @staticmethod
    def _fail(response: BackgroundResponse, error: CorralError) -> None:
        if response.accepted.done():
            response.add(Event(error, time.time()))
        else:
            response.accepted.set_exception(error)
            response.accepted.exception()  # where nobody waits for it, nobody is warned

    async def _generate(self, response: BackgroundResponse) -> None:
        model = find(self.models, response.stored_request.model)
        request = response.stored_request.request
        if response.turn:
            request = continued(request, log.tokens(response.entries), response.turn)
            response.accepted.set_result(None)
        deltas = await self._started(model, request, patiently=response.turn > 0)
        async with aclosing(deltas):
            if not response.accepted.done():
                response.accepted.set_result(None)
            async for _, delta in deltas:
                response.add(Event(delta, time.time()))
                if response.n_readers:
                    self._read.set()

    async def _started(
        self, model: ServedModel, request: GenerationRequest, *, patiently: bool
    ) -> generation.Deltas:
        """Where an ingress was lost, engines may be, too."""
        give_up_at = time.monotonic() + (ABANDONED_S if patiently else 0.0)
        while True:
            try:
                return await generation.start(model, [request])
            except (EngineUnavailableError, QueueFullError):
                if time.monotonic() >= give_up_at:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _tell_on(self) -> None:
        """Tell the store, as long as there are some."""
        while self._responses:
            with suppress(TimeoutError):
                async with asyncio.timeout(TELL_S):
                    await self._read.wait()
            self._read.clear()
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
        appends = [response.unsaved() for response in due]
        if not appends:
            return
        results = await self._store.append(appends)
        for response, append, result in zip(due, appends, results, strict=True):
            response.n_told, response.told_at = append.first + append.n, now
            response.is_left = result is AppendResult.LEAVE and not append.has_ended
            if not response.is_left:
                response.show(response.n_told)
            if result is not AppendResult.GO_ON:
                response.task.cancel()
                response.wake()
            if result is AppendResult.LEAVE or (
                response.is_over and response.n_told == len(response.entries)
            ):
                self._responses.pop(append.id, None)

    async def _put_again(self) -> None:
        """The store was lost: a new one gets all that this ingress has."""
        logger.warning("The kept responses were lost. Those that still run are kept again.")
        for response in list(self._responses.values()):
            whole = response.whole()
            try:
                await self._store.put(
                    response.stored_request.id,
                    response.owner,
                    response.stored_request.packed(),
                    whole,
                )
                response.n_told = whole.n
                response.show(whole.n)
            except ConnectionError:  # nobody else can go on with them
                for one in self._responses.values():
                    one.show(len(one.entries))
                await asyncio.sleep(_PAUSE_S)
                return
            except CorralError:
                logger.exception("%s could not be kept again", response.stored_request.id)

    async def _forget(self, response: BackgroundResponse) -> None:
        self._responses.pop(response.stored_request.id, None)
        with suppress(ConnectionError):
            await self._store.delete(response.stored_request.id, response.owner.key)

    async def keep(self, stored_request: StoredRequest, owner: Owner, entries: list[Event]) -> None:
        """Keep a response that is complete. Waits a moment at most, and raises nothing: its client has an
        answer anyway."""
        response = self._putting[stored_request.id] = BackgroundResponse(
            stored_request, owner, entries
        )
        response.task = self._aside(self._keep(response))
        await asyncio.wait([response.task], timeout=PUT_S)

    def prepare(self) -> None:
        """A response will be kept soon."""
        self._aside(self._prepare())

    async def _prepare(self) -> None:
        try:
            await self._store.prepare()
        except Exception:
            logger.exception("The store of responses cannot be started")

    def _aside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, response: BackgroundResponse) -> None:
        response.is_over = True
        packed, whole = response.stored_request.packed(), response.whole()
        try:
            await self._store.put(response.stored_request.id, response.owner, packed, whole)
        except Exception as error:
            logger.warning("%s is not kept: %s", response.stored_request.id, error)
        self._putting.pop(response.stored_request.id, None)

    async def found(self, response_id: str, key: str | None) -> tuple[StoredRequest, list[Event]]:
        """A response of this key's, as far as it is, its deltas in few entries. Raises
        ResponseNotFoundError."""
        response = self._own(response_id, key)
        if response is not None:
            return response.stored_request, response.entries[: response.n_readable]
        kept = await self._ask(response_id, key)
        entries = [entry async for part in self._parts(kept) for entry in log.merged(part)]
        return StoredRequest.unpacked(kept.stored_request), entries

    async def _parts(self, kept: StoredResponse, since: int = 0) -> AsyncGenerator[Sequence[Event]]:
        """The log from that place on. Between its parts, all others on the event loop have their turn, and
        one log is read at a time: who reads many long ones holds up no stream for longer."""
        parts = kept.parts(since)
        while True:
            async with self._reading:
                part = next(parts, None)
                if part is None:
                    return
                await asyncio.sleep(0)
            yield part

    async def follow(self, response_id: str, key: str | None, since: int) -> AsyncGenerator[Event]:
        """A response's entries from that place on, up to the last one. Ends early if it is deleted."""
        response = self._own(response_id, key)
        if response is not None:
            async for entry in response.follow(since):
                since += 1
                yield entry
            if not response.is_left:
                return
        while True:
            try:
                kept = await self._ask(response_id, key, since, WAIT_S)
            except ResponseNotFoundError:
                return
            async for part in self._parts(kept, since):
                for entry in part:
                    since += 1
                    yield entry
            if kept.has_ended and since >= kept.n_entries:
                return

    async def cancel(self, response_id: str, key: str | None) -> None:
        """Have the making of a response end, and wait for that."""
        response = self._own(response_id, key, only_made=True)
        if response is not None:
            response.task.cancel()
            await asyncio.wait([response.task])
            return
        try:
            await self._store.cancel(response_id, key)
        except ConnectionError:
            raise ResponseNotFoundError(response_id) from None

    async def delete(self, response_id: str, key: str | None) -> None:
        """Forget a response; its making ends. Raises ResponseNotFoundError."""
        response = self._own(response_id, key)
        if response is not None and response_id in self._putting:
            await asyncio.wait([response.task])  # else it would be kept after this
            response = None
        try:
            was_kept = await self._store.delete(response_id, key)
        except ConnectionError:
            was_kept = False
        if response is not None:
            self._responses.pop(response_id, None)
            response.task.cancel()
        elif not was_kept:
            raise ResponseNotFoundError(response_id)

    def _own(
        self, response_id: str, key: str | None, *, only_made: bool = False
    ) -> BackgroundResponse | None:
        response = self._responses.get(response_id)
        if response is None and not only_made:
            response = self._putting.get(response_id)
        if response is None or response.is_left or response.owner.key != key:
            return None
        return response

    async def _ask(
        self, response_id: str, key: str | None, since: int = 0, wait_s: float = 0.0
    ) -> StoredResponse:
        try:
            kept = await self._store.find(response_id, key, since, wait_s)
        except ConnectionError:
            kept = None
        if kept is None:
            raise ResponseNotFoundError(response_id)
        return kept


def continued(
    request: GenerationRequest, tokens: tuple[int, ...], n_before: int
) -> GenerationRequest:
    """The request of the ingress that continues after these tokens, the n-th one.
    As after a failover, a seeded draw is another one."""
    sampling = request.sampling
    if sampling.seed is not None:
        sampling = dataclasses.replace(sampling, seed=sampling.seed + len(tokens))
    return dataclasses.replace(
        request,
        id=f"{request.id}~{n_before}",
        sampling=sampling,
        generated=tokens,
        n_failovers=n_before,
    )
