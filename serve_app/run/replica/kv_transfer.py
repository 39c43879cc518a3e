"""KV transfers from replica to replica: to one that starts, and from one that ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.channel.handle import ReplicaHandle
from serve_app.engine import Engine
from serve_app.engine.cache import packing
from serve_app.engine.cache.prefixes import Prefix
from serve_app.engine.cache.transfers import HotPrefix, Payload, RefusedPrefixError, hottest
from serve_app.run.replica.place import ReplicaPlace

logger = logging.getLogger("corral.replica")

# Transfers delay the start of a replica, or its end, by so much at most. Engines answer between two steps,
# which take seconds while they compute nothing but prompts.
_LIMIT_S = 10.0
# Of that, how long it waits for those who might offer or take something, before it goes on without them.
_OFFERS_S = 4.0
# A new replica gets what at least so many of the last prompts began with.
_SHARED_BY = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """The prefixes that a source could send to a replica that starts."""

    replica_id: str
    key: bytes
    prefixes: list[HotPrefix]


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """The room that a replica has for the prefixes of one that ends."""

    replica_id: str
    key: bytes
    lacks: list[bool]
    """Whether the replica lacks a prefix, for each that it was asked about."""
    room_bytes: int


class KVTransfer:
    """A replica's part in KV transfers. Used in its event loop.

    `pull` is called once, at its start, and `push` once, at its end; neither raises, nor takes longer than
    some seconds. The other methods answer other replicas. These ask all replicas, and one that is not meant
    returns None.
    """

    def __init__(self, engine: Engine, place: ReplicaPlace) -> None:
        self._id, self._peers, self._put = place.replica_id, place.peers, place.put
        self._engine = engine
        self._prefixes = engine.prefixes

    async def pull(self) -> None:
        """Get, as the target, what requests share from the replicas that are there."""
        await self._run_in_time(self._pull, TransferTally("Received", "from"))

    async def push(self) -> None:
        """Send, as the source, to the replicas that stay what they all lack."""
        await self._run_in_time(self._push, TransferTally("Sent", "to"))

    async def _run_in_time(
        self, work: Callable[[ReplicaHandle, TransferTally], Awaitable[None]], tally: TransferTally
    ) -> None:
        if not self._prefixes.budget_bytes or self._peers is None:
            return
        try:
            async with self._peers() as peers:
                async with asyncio.timeout(_LIMIT_S):
                    await work(peers, tally)
        except Exception as error:
            logger.warning("%s no more prefixes: %r.", tally.done, error)
        if tally.n_prefixes:
            logger.info("%s", tally)

    async def _pull(self, peers: ReplicaHandle, tally: TransferTally) -> None:
        offers = await peers.ask_all("offer_prefixes", self._id, timeout_s=_OFFERS_S)
        held = await asyncio.to_thread(self._prefixes.prefixes)
        room_bytes = self._prefixes.budget_bytes - self._engine.stats().cache.stored_bytes
        for wanted, source in plan_pull(self._usable(offers, Offer), held, room_bytes):
            sent: list[Any] | None = await peers.ask_one(
                "send_prefix", source, wanted.prefix, timeout_s=_LIMIT_S
            )
            if not sent:
                continue
            try:
                payload: Payload = await sent[0]
            except Exception as error:  # of Ray's, as its source is gone; the others are not
                logger.warning("A prefix of %s is lost: %r.", source, error)
                continue
            tally.add(source, wanted.prefix, await self._import(payload, wanted.prefix))

    async def _push(self, peers: ReplicaHandle, tally: TransferTally) -> None:
        offered = await asyncio.to_thread(self._prefixes.offers, 1)
        prefixes = [one.prefix for one in offered]
        if not prefixes:
            return
        question = "lack_prefixes", self._id, prefixes
        answers = await peers.ask_all(*question, timeout_s=_OFFERS_S)
        sent: list[Prefix] = []
        for hot, target in plan_push(offered, self._usable(answers, TransferTarget)):
            if any(one.serves(hot.prefix) for one in sent):
                continue
            payload = await asyncio.to_thread(self._prefixes.export_prefix, hot.prefix)
            if payload is not None:
                reference = await asyncio.to_thread(self._put, payload)
                n_bytes = await peers.ask_one(
                    "take_prefix", target, [reference], timeout_s=_LIMIT_S
                )
                tally.add(target, payload.prefix, n_bytes or 0)
                sent.append(payload.prefix)

    # -- what others ask --------------------------------------------------------------------------

    async def offer(self, asker: str) -> Offer | None:
        """Return, as the source, what a replica that starts could have from here."""
        if asker == self._id:
            return None
        prefixes = await asyncio.to_thread(self._prefixes.offers, _SHARED_BY)
        return Offer(self._id, self._prefixes.key, prefixes)

    async def send(self, source: str, prefix: Prefix) -> list[Any] | None:
        """Return, as the source, a reference to a payload that begins with that prefix, for a replica that
        starts. The reference is in a list, as Ray would otherwise fetch the payload for every replica that
        gets the call. The list is empty if there is no such payload any more."""
        if source != self._id:
            return None
        payload = await asyncio.to_thread(self._prefixes.export_prefix, prefix)
        return [] if payload is None else [await asyncio.to_thread(self._put, payload)]

    async def lacks(self, asker: str, prefixes: list[Prefix]) -> TransferTarget | None:
        """Return, as the target, which of these prefixes are not here, and the room for them."""
        if asker == self._id:
            return None
        lacks = await asyncio.to_thread(self._prefixes.lacks, prefixes)
        return TransferTarget(self._id, self._prefixes.key, lacks, self._prefixes.budget_bytes // 2)

    async def take(self, target: str, sent: list[Any]) -> int | None:
        """Store, as the target, a whole prefix from a replica that ends. Returns the bytes kept."""
        if target != self._id:
            return None
        tally = TransferTally("Received", "from")
        payload: Payload = await sent[0]
        tally.add("one that ends", payload.prefix, await self._import(payload, payload.prefix))
        if tally.n_prefixes:
            logger.info("%s", tally)
        return tally.n_bytes

    # ---------------------------------------------------------------------------------------------

    async def _import(self, payload: Payload, prefix: Prefix) -> int:
        """Store what is wanted of a payload; returns the bytes of what is kept."""
        try:
            return await asyncio.to_thread(
                self._prefixes.import_prefix, payload, packing.n_tokens(prefix.tokens)
            )
        except RefusedPrefixError as error:
            logger.warning("Another replica's prefix is refused: %s.", error)
            return 0

    def _usable(self, answers: list[Any], kind: type[Any]) -> list[Any]:
        """The answers of that kind, from replicas whose prefixes this one can use."""
        found = [one for one in answers if isinstance(one, kind)]
        strangers = [one.replica_id for one in found if one.key != self._prefixes.key]
        if strangers:
            logger.warning(
                "No prefixes are transferred from or to %s, because the model or the context differs.",
                strangers,
            )
        return [one for one in found if one.key == self._prefixes.key]


class TransferTally:
    """The amounts sent from replica to replica, for the log."""

    def __init__(self, done: str, way: str) -> None:
        self.done, self._way = done, way
        self._began = time.monotonic()
        self._replicas: set[str] = set()
        self.n_prefixes = self._n_tokens = self.n_bytes = 0

    def add(self, replica_id: str, prefix: Prefix, n_bytes: int) -> None:
        """Count a prefix, if some of it was kept."""
        if n_bytes:
            self._replicas.add(replica_id)
            self.n_prefixes += 1
            self._n_tokens += packing.n_tokens(prefix.tokens)
            self.n_bytes += n_bytes

    def __str__(self) -> str:
        many, several = self.n_prefixes > 1, len(self._replicas) > 1
        return (
            f"{self.done} {self.n_prefixes} {'prefixes' if many else 'prefix'}, "
            f"{self._n_tokens:,} tokens, {self.n_bytes / 2**20:.1f} MiB {self._way} "
            f"{len(self._replicas)} {'replicas' if several else 'replica'} in "
            f"{time.monotonic() - self._began:.2f} s."
        )


def plan_pull(
    offers: Iterable[Offer], held: Sequence[Prefix], room_bytes: int
) -> list[tuple[HotPrefix, str]]:
    """The prefixes that a new replica asks for, the hottest first, each with its source. Of several
    that have it, the one with the smallest state is taken."""
    n_begun, smallest = Counter[Prefix](), dict[Prefix, tuple[int, str]]()
    for offer in offers:
        for hot in offer.prefixes:
            n_begun[hot.prefix] += hot.n_begun
            here = hot.n_bytes, offer.replica_id
            smallest[hot.prefix] = min(smallest.get(hot.prefix, here), here)
    offered = [HotPrefix(hot, n_begun[hot], n_bytes) for hot, (n_bytes, _) in smallest.items()]
    return [(hot, smallest[hot.prefix][1]) for hot in hottest(offered, held, room_bytes)]


def plan_push(
    offered: Sequence[HotPrefix], targets: Iterable[TransferTarget]
) -> list[tuple[HotPrefix, str]]:
    """Offered prefixes that all targets lack, the hottest first, each with the target with most room."""
    lacks, room = [True] * len(offered), dict[str, int]()
    for target in targets:
        lacks = [all(both) for both in zip(lacks, target.lacks, strict=True)]
        room[target.replica_id] = target.room_bytes
    lacked = [hot for hot, missing in zip(offered, lacks, strict=True) if missing]
    given = []
    for hot in hottest(lacked, (), sum(room.values())):
        target_id = max(room, key=lambda replica_id: room[replica_id])
        if hot.n_bytes <= room[target_id]:
            room[target_id] -= hot.n_bytes
            given.append((hot, target_id))
    return given
