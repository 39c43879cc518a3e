"""A model on demand: its place on the node, when it is loaded, and what its process answers.

The model's processes stay when the model is unloaded. To start a process, and to import what an engine
needs, takes seconds. To load a model into a process that has done so takes little more than to read it.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB
from pathlib import Path
from typing import Any
from urllib.parse import quote

from serve_app.base import heap
from serve_app.base.errors import ConfigError, CorralError, EngineUnavailableError
from serve_app.base.sharing import locks
from serve_app.base.sharing.locks import is_locked, lock, make_private
from serve_app.base.values.replicas import Asleep, ReplicaRecords
from serve_app.channel.pressure import PRESSURE
from serve_app.channel.protocol import Address
from serve_app.config.resolved import ResolvedModel
from serve_app.run.replica.loaded_model import LoadedModel
from serve_app.run.replica.place import ReplicaPlace

logger = logging.getLogger("corral.replica")

_LOOK_S = 0.1
"""Seconds between two looks of a loaded model whether it is to go."""
_PLACE_S = 0.02
"""Seconds between two looks of a model that waits whether there is a place."""
_TURN_S = 60.0
"""A model that is never idle gives way to one that is waited for after so long."""
_END_S = 30.0
"""Answers that run then get so long to end. The others go on when it is loaded again."""
_CUT_OFF_S = 1.0
"""Longest time in which calls end after the model is closed."""


class Residency:
    """A process's part in the models on demand of a node. At most `most` of these are loaded at once, each
    with a place.

    A place is a lock on a file, which says how the model is used. A process that waits for a place has a
    lock on a file of its own, which says since when. Used in one thread; nothing here takes long.
    """

    def __init__(self, folder: Path, name: str, most: int) -> None:
        """The process waits under that name, which no other has. Raises OSError for another's folder."""
        make_private(folder)
        self._places = [folder / f"place-{number}" for number in range(most)]
        self._ticket = folder / f"waiting-{quote(name, safe='')}"
        self._since: bytes | None = None
        self._own: Path | None = None
        self._lock = -1
        """Descriptor that holds the lock of the place, if the process has one."""

    def take(self, now: float) -> bool:
        """Take a free place, if there is one, and nobody has waited for longer; it counts as used now."""
        if any(self._since is None or since < self._since for since in self._others_wait()):
            return False
        for place in self._places:
            with suppress(BlockingIOError):
                self._lock = lock(place, LOCK_EX | LOCK_NB)
                self._own = place
                self.note(now)
                return True
        return False

    def note(self, since: float, *, is_busy: bool = False) -> None:
        """The model has worked without a pause since then, or was used last then, by `time.monotonic`."""
        if self._own is not None:
            _write(self._lock, since, is_busy)

    def leave(self) -> None:
        """The model is not loaded any more. Idempotent."""
        if self._own is not None:
            os.close(self._lock)
            self._own = None

    @contextmanager
    def waiting(self, now: float) -> Iterator[None]:
        """Meanwhile, others know that this one waits for a place."""
        ticket = lock(self._ticket, LOCK_EX)  # who looks holds it for microseconds
        try:
            self._since = _write(ticket, now)
            yield
        finally:
            self._since = None
            os.close(ticket)

    def gives_way(self) -> bool:
        """Whether somebody waits, no place is free, and this model is the one to go. That is the idle
        one that was used longest ago, or else the one that has worked for longest."""
        if self._own is None or not self._others_wait():
            return False
        others = [place for place in self._places if place != self._own]
        own = self._own.read_bytes()
        return all(is_locked(place) and place.read_bytes() >= own for place in others)

    def _others_wait(self) -> list[bytes]:
        """The times since when other processes wait, as their files have them."""
        tickets = self._ticket.parent.glob("waiting-*")
        return [path.read_bytes() for path in tickets if path != self._ticket and is_locked(path)]


def _write(descriptor: int, since: float, is_busy: bool = False) -> bytes:
    """The text sorts by who is to go first."""
    text = f"{is_busy:d} {since:020.6f}".encode()
    os.pwrite(descriptor, text, 0)
    return text


class ModelLifecycle:
    """The loading and unloading of a model on demand. Used in one event loop."""

    def __init__(
        self,
        name: str,
        keep_alive_s: float,
        residency: Residency,
        load: Callable[[], Awaitable[LoadedModel]],
        left: Callable[[], None],
    ) -> None:
        """`load` is called when there is a place for the model, and `left` when it is gone."""
        self._name, self._keep_alive_s, self._residency = name, keep_alive_s, residency
        self._load, self._left = load, left
        self.loaded: LoadedModel | None = None
        self._changing = asyncio.Lock()
        self._coming: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        """Tasks of a loaded model: one looks whether it is to go, one tells ingresses that it came."""
        self._n_wanted = self._n_live = 0
        """Calls that want the model, and, of these, those that it works on."""
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._came_at = self._used_at = 0.0
        self._is_released = False
        self._addresses: dict[str, Address] = {}
        """Addresses of ingresses, which are told what the model holds when it is loaded."""

    @asynccontextmanager
    async def present(self) -> AsyncIterator[LoadedModel]:
        """The model, which stays loaded until the end, or until its time is over and it waited for that.
        Raises CorralError if it cannot be loaded."""
        self._n_wanted += 1
        self._is_released = False
        try:
            loaded = await self._come()
            self._n_live += 1
            self._is_quiet.clear()
            try:
                yield loaded
            finally:
                self._n_live -= 1
                if not self._n_live:
                    self._is_quiet.set()
        finally:
            self._n_wanted -= 1
            self._used_at = time.monotonic()

    def release(self) -> None:
        """Unload the model as soon as nobody uses it, unless somebody asks for it before."""
        self._is_released = True

    async def attach(self, address: Address) -> None:
        """Have that ingress told what the model holds, whenever it is loaded."""
        self._addresses[address.path] = address
        if self.loaded is not None:
            await self.loaded.attach(address)

    async def wait_until_known(self) -> None:
        """Returns when the ingresses know that the model has come, or cannot be reached."""
        await asyncio.wait(self._tasks[1:])

    async def close(self) -> None:
        """Unload it for good, whoever uses it. Not twice."""
        async with self._changing:
            for task in self._tasks:
                task.cancel()
            if self.loaded is not None:
                await self.loaded.close()

    # -- coming -----------------------------------------------------------------------------------

    async def _come(self) -> LoadedModel:
        while self.loaded is None:
            if self._coming is None or self._coming.done():
                self._coming = asyncio.create_task(self._load_in_turn())
                # So that asyncio does not log the error of a load that nobody waits for any more.
                self._coming.add_done_callback(
                    lambda coming: coming.cancelled() or coming.exception()
                )
            await asyncio.shield(self._coming)
        return self.loaded

    async def _load_in_turn(self) -> None:
        async with self._changing:
            began = time.monotonic()
            await self._get_place(began)
            had_place = time.monotonic()
            try:
                self.loaded = await self._load()
            except Exception as error:
                self._be_gone()
                if isinstance(error, ConfigError):  # which is no answer of a request
                    message = f"The model cannot be loaded: {error}"
                    raise EngineUnavailableError(message) from error
                if isinstance(error, CorralError):
                    raise
                logger.exception("Model %s cannot be loaded.", self._name)
                raise EngineUnavailableError("The model cannot be loaded.") from error
            now = self._came_at = self._used_at = time.monotonic()
            self._tasks = [asyncio.create_task(one) for one in (self._watch(), self._tell())]
            logger.info(
                "Model %s: loaded in %.2f s, after %.2f s for its place.",
                self._name,
                now - had_place,
                had_place - began,
            )

    async def _get_place(self, now: float) -> None:
        """Raises EngineUnavailableError if nobody wants the model any more."""
        if self._residency.take(now):
            return
        with self._residency.waiting(now):
            while not self._residency.take(time.monotonic()):
                if not self._n_wanted:
                    raise EngineUnavailableError("Nobody waits for the model any more.")
                await asyncio.sleep(_PLACE_S)

    async def _tell(self) -> None:
        """Ingresses that are gone are forgotten; one that is there asks again."""
        if self.loaded is not None:
            for path, address in list(self._addresses.items()):
                if not await self.loaded.attach(address):
                    self._addresses.pop(path, None)

    # -- going ------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._is_to_go(time.monotonic()):
                return await self._go()

    def _is_to_go(self, now: float) -> bool:
        is_busy = self._n_wanted > 0
        self._residency.note(self._came_at if is_busy else self._used_at, is_busy=is_busy)
        if is_busy:
            return now - self._came_at >= _TURN_S and self._residency.gives_way()
        is_idle = self._is_released or now - self._used_at >= self._keep_alive_s
        return is_idle or self._residency.gives_way()

    async def _go(self) -> None:
        """Requests that come meanwhile wait until it is loaded again."""
        async with self._changing:
            loaded, self.loaded = self.loaded, None
            assert loaded is not None
            await self._quiet(_END_S)
            try:
                await loaded.close()
            except Exception:
                logger.exception("Model %s is not wholly unloaded.", self._name)
            if await self._quiet(_CUT_OFF_S):
                loaded.forget()
            del loaded
            self._be_gone()
        logger.info("Model %s: unloaded.", self._name)

    async def _quiet(self, limit_s: float) -> bool:
        """Whether the model works on nothing any more, in so many seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_quiet.wait()
        return self._is_quiet.is_set()

    def _be_gone(self) -> None:
        self._left()
        self._residency.leave()
        self._is_released = False


def _loading(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a loaded model as one of OnDemandModel, which loads the model for it. A CorralError
    is returned if the model cannot be loaded."""

    @functools.wraps(method)
    async def call(self: Any, *arguments: Any) -> Any:
        try:
            async with self.lifecycle.present() as model:
                return await getattr(model, method.__name__)(*arguments)
        except CorralError as error:
            return error

    return call


def _if_loaded(
    method: Callable[..., Any], default: Callable[..., Any] = lambda *_: None
) -> Callable[..., Any]:
    """The method of a loaded model as one of OnDemandModel, which does not load the model for it.
    `default` answers for a model that is not loaded: it gets the replica's id and the arguments."""

    @functools.wraps(method)
    async def call(self: Any, *arguments: Any) -> Any:
        model = self.lifecycle.loaded
        if model is None:
            return default(self.id, *arguments)
        return await getattr(model, method.__name__)(*arguments)

    return call


class OnDemandModel:
    """A model that is loaded and unloaded within one process. Calls that need the model load it; all others
    answer without it while it is not loaded. Used in the replica's event loop."""

    def __init__(self, model: ResolvedModel, place: ReplicaPlace) -> None:
        """Be ready to load the model. Raises OSError."""
        settings = model.on_demand
        assert settings is not None  # or it would be a LoadedModel
        residency = Residency(place.folder / "on-demand", place.replica_id, settings.max_loaded)
        load = functools.partial(LoadedModel.load, model, place)
        self.lifecycle = ModelLifecycle(model.id, settings.keep_alive_s, residency, load, _clean_up)
        self.id = place.replica_id

    generate = _loading(LoadedModel.generate)
    embed = _loading(LoadedModel.embed)
    media_tokens = _loading(LoadedModel.media_tokens)
    load_adapter = _loading(LoadedModel.load_adapter)
    unload_adapter = _if_loaded(LoadedModel.unload_adapter, lambda _, *_arguments: True)
    stats = _if_loaded(LoadedModel.stats, lambda replica_id: Asleep(replica_id))
    explain = _if_loaded(LoadedModel.explain, lambda replica_id, _: ReplicaRecords(replica_id, ()))
    act_on_slot = _if_loaded(LoadedModel.act_on_slot)
    offer_prefixes = _if_loaded(LoadedModel.offer_prefixes)
    send_prefix = _if_loaded(LoadedModel.send_prefix)
    lack_prefixes = _if_loaded(LoadedModel.lack_prefixes)
    take_prefix = _if_loaded(LoadedModel.take_prefix)
    record_autoscaling_stats = _if_loaded(
        LoadedModel.record_autoscaling_stats, lambda _: {PRESSURE: 0.0}
    )

    async def is_there(self) -> CorralError | None:
        """Load the model, and have the ingresses know that. Errors are returned."""
        try:
            async with self.lifecycle.present():
                await self.lifecycle.wait_until_known()
        except CorralError as error:
            return error
        return None

    async def release(self) -> None:
        """Unload the model as soon as nobody uses it, unless somebody asks for it before."""
        self.lifecycle.release()

    async def attach(self, address: Address) -> None:
        """Tell that ingress from now on what the model holds, whenever it is loaded."""
        await self.lifecycle.attach(address)

    def check_health(self) -> None:
        """Serve's hook: see LoadedModel.check_health."""
        model = self.lifecycle.loaded
        if model is not None:
            model.check_health()

    async def leave(self) -> None:
        """Unload the model."""
        await self.lifecycle.close()


def _clean_up() -> None:
    """The loaded parts hang in cycles of Python's, their pages in the heap, and their files are locked."""
    gc.collect()
    heap.trim_soon()
    locks.leave_all()
