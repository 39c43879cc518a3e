"""Takes chunks of a prompt from a slot that has tokens too many before them.

Source: llama.cpp, `n_cache_reuse` in tools/server/server-context.cpp.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.base.errors import DecodeError
from serve_app.engine.backends.base import Backend
from serve_app.engine.cache.contents import SlotContents
from serve_app.engine.cache.packing import TOKEN_BYTES, common_prefix, n_matching, n_tokens
from serve_app.engine.cache.slots import Slot, SlotChoice, SlotTable
from serve_app.engine.core.sequence import Sequence

logger = logging.getLogger("corral.engine")

MAX_CUTS = 64
"""Places where one prompt leaves out tokens: each moves all that is behind."""


class Reuse(NamedTuple):
    """How to make a slot begin as a prompt does."""

    cuts: tuple[tuple[int, int], ...]
    """The cuts in turn: the number of tokens before each, and the number that go."""
    n_cached: int
    """The prompt's first tokens that the slot has then."""


def plan(cached: bytes, prompt: bytes, n_shared: int, n_least: int) -> Reuse:
    """The places where to cut a slot's tokens, so that it has chunks of `n_least` tokens or more that
    come later. The prompt has the first `n_shared` of these tokens. Both are packed. It takes time that
    grows with the slot's tokens, and not with `n_least`. Pure."""
    cuts: list[tuple[int, int]] = []
    have, at, n_gone = n_shared, n_shared, 0
    while len(cuts) < MAX_CUTS:
        chunk = prompt[have * TOKEN_BYTES : (have + n_least) * TOKEN_BYTES]
        if n_tokens(chunk) < n_least:
            break
        at = _find(cached, chunk, at)
        if at < 0:
            break
        if at - n_gone > have:
            cuts.append((have, at - n_gone - have))
            n_gone = at - have
        rest = cached[at * TOKEN_BYTES :]
        n = n_matching(rest, prompt, have * TOKEN_BYTES, len(prompt))
        have, at = have + n, at + n
    return Reuse(tuple(cuts), have)


def _find(tokens: bytes, chunk: bytes, start: int) -> int:
    """The first place from `start` on where these tokens stand; -1 if they do not."""
    place = tokens.find(chunk, start * TOKEN_BYTES)
    while place >= 0 and place % TOKEN_BYTES:
        place = tokens.find(chunk, place + 1)
    return place // TOKEN_BYTES if place >= 0 else -1


@dataclass(frozen=True, slots=True, eq=False)
class ChunkReuse:
    """Cuts slots for requests with `n_cache_reuse`. Models with a window or recurrent layers cannot be cut,
    nor those with positions of several dimensions: nothing happens there. Decoder thread only."""

    _backend: Backend
    _table: SlotTable
    _contents: SlotContents

    def slot_for(self, sequence: Sequence, tokens: bytes) -> int:
        """The slot that the sequence's request asks for, or the idle one that can be cut to have most of
        these tokens. It is -1 if there is neither."""
        request = sequence.request
        if request.slot_id >= 0 or not self._applies(sequence):
            return request.slot_id
        found = [
            (reuse.n_cached, slot.id)
            for slot in self._table.slots
            if slot.idle and (reuse := self._plan(sequence, slot, tokens)).cuts
        ]
        return max(found, default=(0, -1))[1]

    def fill(self, sequence: Sequence, choice: SlotChoice, tokens: bytes) -> int | None:
        """Cut the chosen slot to these tokens, if it has more of them then than by the choice; returns how
        many. None: nothing was done."""
        slot = choice.slot
        if not self._applies(sequence) or slot.id in self._backend.slots_with_pending_copy:
            return None
        reuse = self._plan(sequence, slot, tokens)
        if reuse.n_cached <= choice.n_cached:
            return None
        slot.n_shared = 0
        try:
            self._backend.shift(slot.id, reuse.cuts)
        except DecodeError as error:
            logger.warning("Chunks of a prompt are computed again: %s", error)
            return self._contents.keep(slot, 0)
        sequence.n_exact = reuse.cuts[0][0] if reuse.cuts else None
        return self._contents.keep(slot, reuse.n_cached)

    def _applies(self, sequence: Sequence) -> bool:
        traits = self._backend.traits
        able = traits.can_shift and not traits.forgets
        return sequence.request.n_cache_reuse > 0 and able

    def _plan(self, sequence: Sequence, slot: Slot, tokens: bytes) -> Reuse:
        """How much the slot can have of these tokens, but for the last one."""
        if slot.group != sequence.request.content_group:
            return Reuse((), 0)
        cached, prompt = slot.packed_tokens(len(slot.idle_tokens)), tokens[:-TOKEN_BYTES]
        n_shared = common_prefix(cached, prompt) // TOKEN_BYTES
        return plan(cached, prompt, n_shared, sequence.request.n_cache_reuse)
