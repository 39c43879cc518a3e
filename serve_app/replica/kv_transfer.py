"""Prefixes that go from replica to replica: to one that comes, and from one that leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from serve_app.engine import Engine
from serve_app.engine.kv_cache import state_format
from serve_app.engine.kv_cache.hot_prefixes import HotPrefix, hottest
from serve_app.engine.kv_cache.transfer import Parcel, RefusedPrefixError
from serve_app.routing import broadcast

logger = logging.getLogger("corral.replica")

# A replica that comes is not ready, and one that leaves does not end, for so much longer at most. Engines
# answer between two steps, which are seconds while they compute nothing but prompts.
_LIMIT_S = 10.0
# Of that, how long it waits for those who might offer or take something, before it goes on without them.
_OFFERS_S = 4.0
# A new replica gets what so many of the last prompts began with: what a single one has is its own affair.
_SHARED_BY = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """What a replica could give to one that comes."""

    replica_id: str
    key: bytes
    """See `Parcel.key`."""
    prefixes: list[HotPrefix]


@dataclass(frozen=True, slots=True)
class Heir:
    """What a replica could take of one that leaves."""

    replica_id: str
    key: bytes
    lacks: list[bool]
    """For each prefix that it was asked about."""
    room_bytes: int


class Handover:
    """One replica's part in it. Used in its event loop.

    `receive` and `bequeath` are called once, at its start and at its end; neither raises, nor takes longer
    than some seconds. The others answer other replicas, who ask all: those that are not meant return None.
    """

    def __init__(self, engine: Engine) -> None:
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._peers: DeploymentHandle[Any] = serve.get_deployment_handle(
            context.deployment, context.app_name
        )
        self._engine = engine
        self._prefixes = engine.prefixes

    async def receive(self) -> None:
        """Get what requests share from the replicas that are there."""
        await self._bounded(self._receive, Tally("Received", "from"))

    async def bequeath(self) -> None:
        """Give those that stay what they lack."""
        await self._bounded(self._bequeath, Tally("Handed over", "to"))

    async def _bounded(self, work: Callable[[Tally], Awaitable[None]], tally: Tally) -> None:
        if not self._prefixes.budget_bytes:
            return
        try:
            async with asyncio.timeout(_LIMIT_S):
                await work(tally)
        except Exception as error:
            logger.warning("%s no more prefixes: %r.", tally.done, error)
        if tally.n_prefixes:
            logger.info("%s", tally)

    async def _receive(self, tally: Tally) -> None:
        offers = await broadcast.ask_all(
            self._peers, "offer_prefixes", self._id, timeout_s=_OFFERS_S
        )
        held = await asyncio.to_thread(self._prefixes.held)
        room_bytes = self._prefixes.budget_bytes - self._engine.stats().stored_bytes
        for wanted, elder in wishes(self._usable(offers, Offer), held, room_bytes):
            sent: list[Any] | None = await broadcast.ask_one(
                self._peers, "send_prefix", elder, wanted.tokens, timeout_s=_LIMIT_S
            )
            if not sent:
                continue
            try:
                parcel: Parcel = await sent[0]
            except RayError as error:  # its giver is gone; the others are not
                logger.warning("A prefix of %s is lost: %r.", elder, error)
                continue
            tally.add(elder, wanted.tokens, await self._adopt(parcel, wanted.tokens))

    async def _bequeath(self, tally: Tally) -> None:
        offered = await asyncio.to_thread(self._prefixes.offers, 1)
        tokens = [one.tokens for one in offered]
        if not tokens:
            return
        asked = "lack_prefixes", self._id, tokens
        answers = await broadcast.ask_all(self._peers, *asked, timeout_s=_OFFERS_S)
        sent: list[bytes] = []
        for wanted, heir in bequests(offered, self._usable(answers, Heir)):
            if any(one.startswith(wanted.tokens) for one in sent):
                continue
            parcel = await asyncio.to_thread(self._prefixes.lend, wanted.tokens)
            if parcel is not None:
                reference = await asyncio.to_thread(ray.put, parcel)
                n_bytes = await broadcast.ask_one(
                    self._peers, "take_prefix", heir, [reference], timeout_s=_LIMIT_S
                )
                tally.add(heir, parcel.tokens, n_bytes or 0)
                sent.append(parcel.tokens)

    # -- what others ask --------------------------------------------------------------------------

    async def offer(self, asker: str) -> Offer | None:
        """To one that comes: what it could have from here."""
        if asker == self._id:
            return None
        prefixes = await asyncio.to_thread(self._prefixes.offers, _SHARED_BY)
        return Offer(self._id, self._prefixes.key, prefixes)

    async def send(self, giver: str, tokens: bytes) -> list[Any] | None:
        """To one that comes: a reference to a parcel that begins with these tokens. In a list, as Ray would
        fetch it else for everybody whom it is sent to; the list is empty if there is none any more."""
        if giver != self._id:
            return None
        parcel = await asyncio.to_thread(self._prefixes.lend, tokens)
        return [] if parcel is None else [await asyncio.to_thread(ray.put, parcel)]

    async def lacks(self, asker: str, prefixes: list[bytes]) -> Heir | None:
        """To one that leaves: what of this is not here, and the bytes that could be."""
        if asker == self._id:
            return None
        lacks = await asyncio.to_thread(self._prefixes.lacks, prefixes)
        return Heir(self._id, self._prefixes.key, lacks, self._prefixes.budget_bytes // 2)

    async def take(self, heir: str, sent: list[Any]) -> int | None:
        """From one that leaves: a prefix, whole; returns the bytes that are kept of it."""
        if heir != self._id:
            return None
        tally = Tally("Received", "from")
        parcel: Parcel = await sent[0]
        tally.add("one that leaves", parcel.tokens, await self._adopt(parcel, parcel.tokens))
        if tally.n_prefixes:
            logger.info("%s", tally)
        return tally.n_bytes

    # ---------------------------------------------------------------------------------------------

    async def _adopt(self, parcel: Parcel, wanted: bytes) -> int:
        """Store what is wanted of it; returns the bytes of what is kept."""
        try:
            return await asyncio.to_thread(
                self._prefixes.adopt, parcel, state_format.n_tokens(wanted)
            )
        except RefusedPrefixError as error:
            logger.warning("Another replica's prefix is refused: %s.", error)
            return 0

    def _usable(self, answers: list[Any], kind: type[Any]) -> list[Any]:
        """Those answers that are one, of replicas whose prefixes are good for this one."""
        found = [one for one in answers if isinstance(one, kind)]
        strangers = [one.replica_id for one in found if one.key != self._prefixes.key]
        if strangers:
            logger.warning(
                "No prefixes are exchanged with %s: another model or context.", strangers
            )
        return [one for one in found if one.key == self._prefixes.key]


class Tally:
    """What went from replica to replica, for the log."""

    def __init__(self, done: str, way: str) -> None:
        self.done, self._way = done, way
        self._began = time.monotonic()
        self._replicas: set[str] = set()
        self.n_prefixes = self._n_tokens = self.n_bytes = 0

    def add(self, replica_id: str, tokens: bytes, n_bytes: int) -> None:
        """Count a prefix of these tokens, packed, if some of it was kept."""
        if n_bytes:
            self._replicas.add(replica_id)
            self.n_prefixes += 1
            self._n_tokens += state_format.n_tokens(tokens)
            self.n_bytes += n_bytes

    def __str__(self) -> str:
        many, several = self.n_prefixes > 1, len(self._replicas) > 1
        return (
            f"{self.done} {self.n_prefixes} {'prefixes' if many else 'prefix'}, "
            f"{self._n_tokens:,} tokens, {self.n_bytes / 2**20:.1f} MiB {self._way} "
            f"{len(self._replicas)} {'replicas' if several else 'replica'} in "
            f"{time.monotonic() - self._began:.2f} s."
        )


def wishes(
    offers: Iterable[Offer], held: Sequence[bytes], room_bytes: int
) -> list[tuple[HotPrefix, str]]:
    """What a new replica asks for, the hottest first, and whom: of several that have it, the one with the
    smallest state."""
    n_begun, smallest = Counter[bytes](), dict[bytes, tuple[int, str]]()
    for offer in offers:
        for one in offer.prefixes:
            n_begun[one.tokens] += one.n_begun
            here = one.n_bytes, offer.replica_id
            smallest[one.tokens] = min(smallest.get(one.tokens, here), here)
    offered = [HotPrefix(one, n_begun[one], n_bytes) for one, (n_bytes, _) in smallest.items()]
    return [(one, smallest[one.tokens][1]) for one in hottest(offered, held, room_bytes)]


def bequests(offered: Sequence[HotPrefix], heirs: Iterable[Heir]) -> list[tuple[HotPrefix, str]]:
    """What of that all heirs lack, the hottest first, and who gets it: whoever has most room left."""
    lacks, room = [True] * len(offered), dict[str, int]()
    for heir in heirs:
        lacks = [all(both) for both in zip(lacks, heir.lacks, strict=True)]
        room[heir.replica_id] = heir.room_bytes
    lacked = [one for one, missing in zip(offered, lacks, strict=True) if missing]
    given = []
    for one in hottest(lacked, (), sum(room.values())):
        heir_id = max(room, key=lambda replica_id: room[replica_id])
        if one.n_bytes <= room[heir_id]:
            room[heir_id] -= one.n_bytes
            given.append((one, heir_id))
    return given
