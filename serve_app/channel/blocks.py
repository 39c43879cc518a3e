"""Prefixes as chains of block hashes. Pure: no Ray, no model, no threads."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from hashlib import blake2b
from zlib import crc32

from serve_app.base.values.adapters import SHARED_GROUP

BLOCK_TOKENS = 32
"""Tokens in a block. A shorter rest has no hash: it counts as not shared."""
MAX_BLOCKS = 2048
"""Most blocks that a replica reports: 64 Ki tokens in 10 KiB."""

Chain = tuple[int, ...]
"""A hash for each whole block of a prompt, made of the block's tokens and the hash before. The first one is
made of the cache group, too. So equal hashes mean equal prompts of one group up to there. A hash has 32
bits, because a collision costs no more than a worse choice."""


def chain(tokens: Sequence[int], group: str = SHARED_GROUP) -> Chain:
    """The chain of a prompt of that cache group; the same in every process and on every machine."""
    packed = struct.pack(f"<{len(tokens)}i", *tokens)  # those of pictures are negative
    step = 4 * BLOCK_TOKENS
    hashes = []
    before = b"" if group == SHARED_GROUP else blake2b(group.encode(), digest_size=16).digest()
    for end in range(step, len(packed) + 1, step):
        before = blake2b(before + packed[end - step : end], digest_size=4).digest()
        hashes.append(int.from_bytes(before, "little"))
    return tuple(hashes)


def n_leading(blocks: Chain, held: Container[int]) -> int:
    """How many of the first blocks are held. A replica that holds a block holds all blocks before it."""
    return bisect_left(blocks, True, key=lambda block: block not in held)


def request_key(request_id: str) -> int:
    return crc32(request_id.encode())


def turn_key(adapters: str) -> int:
    """The hash of what requests have of adapters, by `adapters_of`; 0 for none."""
    return crc32(adapters.encode())


class Inventory:
    """The blocks of changing sets of prompts; those of a prompt that stays are computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[Sequence[int], Chain]] = {}
        """The prompts and their blocks, by the cache group and the prompt's `id`. The `id` stays the
        prompt's own as long as the prompt is kept here."""

    def blocks(self, prompts: Iterable[tuple[str, Sequence[int]]]) -> list[int]:
        """The blocks of these prompts, each with its cache group, the most important one first: as many as
        may be reported. Nobody may change a prompt after it was seen here."""
        known, reported = {}, dict[int, None]()
        for group, tokens in prompts:
            room = MAX_BLOCKS - len(reported)
            if room <= 0:
                break
            key = group, id(tokens)
            entry = self._known.get(key) or (tokens, chain(tokens, group))
            known[key] = entry
            new = [block for block in entry[1] if block not in reported]
            reported.update(dict.fromkeys(new[:room]))
        self._known = known
        return list(reported)
