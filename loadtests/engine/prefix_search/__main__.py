"""Measures what the decoder thread spends on finding prefixes. No model, no Ray, no HTTP.

    python -m loadtests.engine.prefix_search [--slots 1,8,32] [--tokens 8192,131072] [--stored 0,10000]
        [--rounds 5]

All slots hold prompts of that length that differ in their last tokens only, so that nothing can be
told apart early. Stored prefixes share their first half. A request is one that finds a prefix in a
slot: it is placed, and later released; all slots are full before. A step has one prompt that waits
for a prefix which is being computed, while all other slots generate, and makes the list of all that
is held. Work for a request beside the decoder thread is reported separately. The model's part is
left out: nothing is copied.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import product
from typing import Any, TypeVar, cast
from unittest import mock

from loadtests.common.benchmark import listed, table
from serve_app.engine import GenerationRequest
from serve_app.engine.backends.base import MemoryUse
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.kv_cache.manager import KVCacheManager, Place
from serve_app.engine.kv_cache.memory_tier import MemoryTier, StoredPrefix
from serve_app.engine.kv_cache.packing import token_array
from serve_app.engine.kv_cache.prefix_index import PrefixIndex
from serve_app.engine.kv_cache.slots import PrefixPending, SlotTable

T = TypeVar("T")

_N_VOCAB = 151_936
_STORED_TOKENS = 512
_END_TOKENS = 64
"""Last tokens in which prompts differ."""
_STEPS = 20
_HEADER = ("slots", "tokens", "stored", "a request, ms", "a step, ms", "beside it, a request, ms")
_VOCABULARY = list(range(_N_VOCAB))  # numbers are shared, or they would take most of the memory


class Bench:
    """A cache with all its slots full."""

    def __init__(self, n_slots: int, n_tokens: int, n_stored: int) -> None:
        self._rng = random.Random(0)
        self._shared = self._tokens(n_tokens - _END_TOKENS)
        memory = MemoryUse(0, 0, 0, 4, 0)
        backend = mock.Mock(slots_with_pending_copy=frozenset(), memory=memory, forgets=False)
        half = self._tokens(_STORED_TOKENS // 2)
        stored = [
            StoredPrefix(token_array(half + self._tokens(_STORED_TOKENS // 2)), b"", "")
            for _ in range(n_stored)
        ]
        index = PrefixIndex()
        slots = SlotTable(n_slots, 16, index=index)
        tier = MemoryTier(n_stored, stored, index=index)
        self._cache = KVCacheManager(cast(Any, backend), slots, tier)
        for _ in range(n_slots):
            self._run(self._prompt())
        for _ in range(n_slots):
            self._release()

    def _tokens(self, n: int) -> list[int]:
        return self._rng.choices(_VOCABULARY, k=n)

    def _prompt(self) -> Sequence:
        prompt = self._shared + self._tokens(_END_TOKENS)
        return _sequence(prompt)

    def _run(self, sequence: Sequence) -> None:
        """Give it a slot."""
        place = self._cache.place(sequence)
        assert isinstance(place, Place)
        sequence.admit(place.slot.id, place.n_cached, None)
        self._cache.table.occupy(place.slot, sequence)
        sequence.advance(sequence.n_pending)

    def _release(self) -> None:
        """End the sequence that has run for longest."""
        slots = (slot for slot in self._cache.table.slots if slot.sequence is not None)
        self._cache.release(cast(Sequence, next(slots).sequence))

    def request_s(self) -> tuple[float, float]:
        """Seconds of the decoder thread, and of the one that submits."""
        prompt = tuple(self._shared + self._tokens(_END_TOKENS))
        beside_s, sequence = _timed(lambda: _sequence(prompt))
        run_s, _ = _timed(lambda: self._run(sequence))
        release_s, _ = _timed(self._release)
        return run_s + release_s, beside_s

    def step_s(self) -> float:
        """Seconds of one step of several."""
        slots = self._cache.table.slots
        for _ in slots[1:]:
            self._run(self._prompt())
        waiting = self._prompt()
        running = [slot.sequence for slot in slots if slot.sequence is not None]
        if running:  # the last one is still being computed, and shares more than all others
            running[-1].n_past = 0
            waiting = _sequence([*running[-1].tokens, 1])

        def search() -> None:
            if running:
                assert isinstance(self._cache.place(waiting), PrefixPending)
            assert self._cache.prompts

        gc.collect(0)  # a new prompt costs the collector something once, which is no step's
        seconds = 0.0
        for _ in range(_STEPS):
            for sequence in running[:-1]:
                sequence.tokens.append(1)
                sequence.advance(1)
            seconds += _timed(search)[0] / _STEPS
        for _ in running:
            self._release()
        return seconds


def _sequence(prompt: SequenceOf[int]) -> Sequence:
    return Sequence(GenerationRequest("", tuple(prompt)), lambda delta: None)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _row(n_slots: int, n_tokens: int, n_stored: int, n_rounds: int) -> tuple[object, ...]:
    bench = Bench(n_slots, n_tokens, n_stored)
    requests = [bench.request_s() for _ in range(n_rounds)]
    steps = [bench.step_s() for _ in range(n_rounds)]
    seconds = (
        statistics.median(one for one, _ in requests),
        statistics.median(steps),
        statistics.median(one for _, one in requests),
    )
    return (n_slots, n_tokens, n_stored, *(f"{1000 * one:.3f}" for one in seconds))


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slots", type=listed(int), default=(1, 8, 32))
    parser.add_argument("--tokens", type=listed(int), default=(8192, 131_072))
    parser.add_argument("--stored", type=listed(int), default=(0, 10_000))
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    rows = [
        _row(*sizes, asked.rounds) for sizes in product(asked.slots, asked.tokens, asked.stored)
    ]
    print(table(_HEADER, rows))


if __name__ == "__main__":
    main()
