"""KV transfers: prefixes that engines send each other, and the choice of those that are worth most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import DecodeError
from serve_app.engine.cache.contents import Checkpoint, StoredPrefix
from serve_app.engine.cache.files import key_of
from serve_app.engine.cache.packing import TOKEN_BYTES, token_array
from serve_app.engine.cache.prefixes import Prefix, beginning, n_shared, nearest
from serve_app.engine.core.command_queue import RunCommand

if TYPE_CHECKING:
    from serve_app.engine.cache.manager import KVCacheManager

MAX_PREFIXES = 32
"""Most prefixes that one engine gets from others at once."""
# Computing fewer tokens than this costs next to nothing.
_LEAST_BYTES = 32 * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning of prompts, and what having it costs."""

    prefix: Prefix
    n_begun: int
    """How many of the last prompts began with it."""
    n_bytes: int
    """The bytes of the smallest state that it can be taken from."""


def begun_with(
    prompts: Iterable[Prefix], held: Iterable[tuple[Prefix, int]], least: int
) -> list[HotPrefix]:
    """Prompts, and what several of a cache group have in common, if the group holds it and at least so
    many prompts began with it. `held` come with the bytes of their states."""
    begun, holders = sorted(prompts), sorted(held)
    known = [prefix for prefix, _ in holders]
    found = set(begun) | {prefix.cut(n_shared(prefix, other)) for prefix, other in pairwise(begun)}
    hot = []
    for prefix in {prefix.cut(nearest(known, prefix)[0]) for prefix in found}:
        n_begun = len(begun[beginning(begun, prefix)])
        if len(prefix.tokens) >= _LEAST_BYTES and n_begun >= least:
            smallest = min(n_bytes for _, n_bytes in holders[beginning(known, prefix)])
            hot.append(HotPrefix(prefix, n_begun, smallest))
    return hot


def hottest(
    offered: Iterable[HotPrefix], held: Sequence[Prefix], budget_bytes: int
) -> list[HotPrefix]:
    """The prefixes to take into so many bytes, the best first, given those already held.

    Each time, that which saves the most tokens for its bytes. It saves what nothing taken before has, as
    often as prompts began with it lately. A prefix of a longer offer that is taken is not taken again.
    """
    shared = {
        offer: max((n_shared(offer.prefix, known) for known in held), default=0)
        for offer in offered
    }
    chosen: list[HotPrefix] = []
    while len(chosen) < MAX_PREFIXES:
        room = budget_bytes - sum(offer.n_bytes for offer in chosen)
        shared = {
            offer: n
            for offer, n in shared.items()
            if offer.n_bytes <= room and len(offer.prefix.tokens) - n >= _LEAST_BYTES
        }
        if not shared:
            break
        best = max(
            shared,
            key=lambda offer: (
                offer.n_begun * (len(offer.prefix.tokens) - shared[offer]) / max(1, offer.n_bytes),
                offer.prefix,
            ),
        )
        chosen = [offer for offer in chosen if not best.prefix.serves(offer.prefix)]
        chosen.append(best)
        for offer in shared:
            shared[offer] = max(shared[offer], n_shared(offer.prefix, best.prefix))
    return sorted(chosen, key=lambda offer: -offer.n_begun)


class RefusedPrefixError(Exception):
    """Another engine's prefix cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A prefix on its way to another engine, whose process may be another one."""

    key: bytes
    prefix: Prefix
    state: NDArray[np.uint8]
    checkpoints: tuple[tuple[int, NDArray[np.uint8]], ...] = ()
    """The tokens and states of prefixes."""


class PrefixTransfer:
    """Exports one engine's prefixes to other engines, and imports theirs. Any thread but the
    decoder's; every call waits until that thread has run a command between two steps. Raises
    EngineClosedError or EngineFailedError if the engine is closed or has failed."""

    def __init__(self, options: EngineOptions, state_key: bytes, run: RunCommand) -> None:
        self.key = key_of(state_key)
        """Engines of one key can use each other's prefixes."""
        self.budget_bytes = options.cache_ram_bytes
        """The most bytes of prefixes that it keeps; 0: it takes none."""
        self._options = options
        self._run = run

    def offers(self, least: int) -> list[HotPrefix]:
        """The prefixes that it holds and that at least so many of the last prompts began with."""
        begun, held = self._run(lambda cache: (list(cache.begun), _usable_prefixes(cache)))
        return begun_with(begun, held, least)

    def prefixes(self) -> list[Prefix]:
        return [prefix for prefix, _ in self._run(_usable_prefixes)]

    def lacks(self, prefixes: Sequence[Prefix]) -> list[bool]:
        """Whether the engine would have to compute some of it, for each of these prefixes."""
        held = self.prefixes()
        return [not any(one.serves(wanted) for one in held) for wanted in prefixes]

    def export_prefix(self, prefix: Prefix) -> Payload | None:
        """The shortest prefix of that cache group with these first tokens. None if it is gone, or if
        saving it would keep running sequences waiting for longer than `max_stall_ms`."""
        stored: StoredPrefix | None = self._run(lambda cache: _export(cache, prefix))
        if stored is None:
            return None
        marks = ((one.n_tokens, np.frombuffer(one.state, np.uint8)) for one in stored.checkpoints)
        return Payload(self.key, stored.key, np.frombuffer(stored.state, np.uint8), tuple(marks))

    def import_prefix(self, payload: Payload, n_wanted: int) -> int:
        """Store another engine's prefix for its cache group, of which the first `n_wanted` tokens are
        wanted. If a slot is empty and nobody runs, what is behind these is cut off. Returns the bytes of
        what is stored now, 0 if it is nothing. The payload's memory may be freed then. Raises
        RefusedPrefixError if the payload cannot be used."""
        if payload.key != self.key:
            raise RefusedPrefixError("it is of another model, context or version of llama.cpp")
        tokens = token_array(payload.prefix.tokens)
        if not 0 < n_wanted <= len(tokens) < self._options.n_ctx_slot:
            raise RefusedPrefixError(f"it has {len(tokens)} tokens")
        lengths = [0, *(n for n, _ in payload.checkpoints), len(tokens) + 1]
        if any(n >= longer for n, longer in pairwise(lengths)):
            raise RefusedPrefixError(f"it has checkpoints of {lengths[1:-1]} tokens")
        marks = tuple(Checkpoint(n, state.copy().data) for n, state in payload.checkpoints)
        prefix = StoredPrefix(tokens, payload.state.copy().data, payload.prefix.group, marks)
        try:
            n_bytes: int = self._run(lambda cache: _import(cache, prefix, n_wanted))
        except DecodeError as error:
            raise RefusedPrefixError(str(error)) from error
        return n_bytes


# -- decoder thread -------------------------------------------------------------------------------


def _usable_prefixes(cache: KVCacheManager) -> list[tuple[Prefix, int]]:
    """The prefixes that prompts could start from now, each with the bytes of its state."""
    in_slots = (
        (
            Prefix(slot.group, slot.packed_tokens(slot.n_past)),
            cache.contents.n_bytes(slot, slot.n_past),
        )
        for slot in cache.table.slots
    )
    return [*in_slots, *((one.key, one.n_bytes) for one in cache.memory_tier)]


def _export(cache: KVCacheManager, prefix: Prefix) -> StoredPrefix | None:
    pending = cache.backend.slots_with_pending_copy
    slots = [
        slot
        for slot in cache.table.having(*prefix)
        if slot.group == prefix.group and slot.id not in pending
    ]
    stored = cache.memory_tier.beginning(*prefix)
    slot = min(slots, key=lambda slot: slot.n_past, default=None)
    if slot is not None and (stored is None or slot.n_past < len(stored.tokens)):
        n_bytes = cache.backend.memory.state_bytes(slot.n_past)
        if not cache.table.busy or cache.copies.allows(cache.copies.saves, n_bytes):
            stored = cache.contents.save(slot, slot.tokens[: slot.n_past])
    if stored is not None:
        stored = cache.contents.whole(stored)
        cache.transferred["sent_prefixes"] += 1
        cache.transferred["sent_bytes"] += stored.n_bytes
    return stored


def _import(cache: KVCacheManager, prefix: StoredPrefix, n_wanted: int) -> int:
    """Store a prefix; returns the bytes stored. Raises DecodeError if the backend refuses a state that
    is cut; else that shows when it is needed."""
    pending = cache.backend.slots_with_pending_copy
    empty = [
        slot
        for slot in cache.table.slots
        if slot.idle and not slot.idle_tokens and slot.id not in pending
    ]
    fits = n_wanted < len(prefix.tokens) <= cache.table.room
    if fits and empty and not cache.table.busy:
        # Up to its last checkpoint if the model's memory cannot be cut there, or all if it has none.
        slot, contents = empty[0], cache.contents
        contents.restore(slot, prefix)
        if n_kept := contents.keep(slot, n_wanted):
            prefix = contents.save(slot, prefix.tokens[:n_kept], prefix.group)
            contents.keep(slot, 0)
    if not cache.memory_tier.wants(prefix.group, prefix.tokens, prefix.n_bytes):
        return 0
    cache.memory_tier.put(prefix.group, prefix.tokens, prefix.state, prefix.checkpoints)
    cache.transferred["received_prefixes"] += 1
    cache.transferred["received_bytes"] += prefix.n_bytes
    return prefix.n_bytes
