"""Prefixes that engines give to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.engine.commands import Errand
from serve_app.engine.kv_cache import state_format
from serve_app.engine.kv_cache.hot_prefixes import HotPrefix, begun_with
from serve_app.engine.kv_cache.manager import Held, Lanes
from serve_app.engine.kv_cache.memory_tier import StoredPrefix
from serve_app.engine.options import EngineOptions
from serve_app.errors import DecodeError


class RefusedPrefixError(Exception):
    """Another engine's prefix cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A prefix on its way to another engine, whose process may be another one."""

    key: bytes
    """What its state depends on: see `prefix_file.key_of`."""
    tokens: bytes
    """Packed."""
    state: NDArray[np.uint8]


class PrefixExchange:
    """What one engine gives to others and takes from them. Any thread but the decoder's; every call waits
    for it, between two steps.

    `ask` has an errand done. Raises EngineClosedError or EngineFailedError with the engine."""

    def __init__(
        self, options: EngineOptions, state_key: bytes, ask: Callable[[Errand], None]
    ) -> None:
        self.key = state_format.key_of(state_key)
        """Engines of one key can use each other's prefixes."""
        self.budget_bytes = options.cache_ram_bytes
        """What it keeps of all prefixes; 0: it takes none."""
        self._options = options
        self._ask = ask

    def offers(self, least: int) -> list[HotPrefix]:
        """What it holds of that which at least so many of the last prompts began with."""
        begun, held = self._done(lambda lanes: (list(lanes.begun), lanes.held))
        priced = [(state_format.packed(one.tokens), one.n_bytes) for one in held]
        return begun_with(begun, priced, least)

    def held(self) -> list[bytes]:
        """The tokens of all that it holds, packed."""
        held: list[Held] = self._done(lambda lanes: lanes.held)
        return [state_format.packed(one.tokens) for one in held]

    def lacks(self, prefixes: Sequence[bytes]) -> list[bool]:
        """For each of these beginnings of prompts, whether it would have to compute some of it."""
        held = self.held()
        return [not any(one.startswith(wanted) for one in held) for wanted in prefixes]

    def lend(self, tokens: bytes) -> Parcel | None:
        """The shortest prefix with these first tokens. None if it is gone, or if saving it would keep
        running sequences waiting for longer than `max_stall_s`."""
        wanted, most_s = state_format.unpacked(tokens), self._options.max_stall_s
        found: StoredPrefix | None = self._done(lambda lanes: lanes.lend(wanted, most_s))
        if found is None:
            return None
        state = np.frombuffer(found.state, np.uint8)
        return Parcel(self.key, state_format.packed(found.tokens), state)

    def adopt(self, parcel: Parcel, n_wanted: int) -> int:
        """Store another engine's prefix, of which so many first tokens are wanted, as `Lanes.adopt` does;
        returns the bytes of what is stored now, 0 if it is nothing. The parcel's memory may be given back
        then. Raises RefusedPrefixError for one of which no use can be made."""
        if parcel.key != self.key:
            raise RefusedPrefixError("it is of another model, context or version of llama.cpp")
        tokens = state_format.unpacked(parcel.tokens)
        if not 0 < n_wanted <= len(tokens) < self._options.n_ctx_slot:
            raise RefusedPrefixError(f"it has {len(tokens)} tokens")
        prefix = StoredPrefix(tokens, parcel.state.copy().data)
        try:
            stored = self._done(lambda lanes: lanes.adopt(prefix, n_wanted))
        except DecodeError as error:
            raise RefusedPrefixError(str(error)) from error
        return 0 if stored is None else len(stored.state)

    def _done(self, run: Callable[[Lanes], Any]) -> Any:
        errand = Errand(run)
        self._ask(errand)
        return errand.future.result()
