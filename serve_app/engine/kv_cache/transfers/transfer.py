"""One engine's part in KV transfers: prefixes that engines send each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.engine.core.command_queue import Command
from serve_app.engine.kv_cache import state_format
from serve_app.engine.kv_cache.checkpoints import Checkpoint
from serve_app.engine.kv_cache.manager import KVCacheManager
from serve_app.engine.kv_cache.memory_tier import StoredPrefix
from serve_app.engine.kv_cache.packing import packed, token_array
from serve_app.engine.kv_cache.transfers.hot_prefixes import HotPrefix, Prefix, begun_with
from serve_app.engine.metrics.stats import CachedPrompt
from serve_app.engine.options import EngineOptions
from serve_app.errors import DecodeError


class RefusedPrefixError(Exception):
    """Another engine's prefix cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A prefix on its way to another engine, whose process may be another one."""

    key: bytes
    """The key of all that its state depends on: see `state_format.key_of`."""
    prefix: Prefix
    state: NDArray[np.uint8]
    checkpoints: tuple[tuple[int, NDArray[np.uint8]], ...] = ()
    """The tokens and states of prefixes."""


class PrefixTransfer:
    """Exports one engine's prefixes to other engines, and imports theirs. Any thread but the
    decoder's; every call waits until that thread has run a command between two steps.

    `run_between_steps` gives it that command. Raises EngineClosedError or EngineFailedError if the engine
    is closed or has failed."""

    def __init__(
        self, options: EngineOptions, state_key: bytes, run_between_steps: Callable[[Command], None]
    ) -> None:
        self.key = state_format.key_of(state_key)
        """Engines of one key can use each other's prefixes."""
        self.budget_bytes = options.cache_ram_bytes
        """The most bytes of prefixes that it keeps; 0: it takes none."""
        self._options = options
        self._run_between_steps = run_between_steps

    def offers(self, least: int) -> list[HotPrefix]:
        """The prefixes that it holds and that at least so many of the last prompts began with."""
        begun, held = self._run(lambda cache: (list(cache.exchange.begun), cache.exchange.held))
        return begun_with(begun, [(_packed(one), n_bytes) for one, n_bytes in held], least)

    def held(self) -> list[Prefix]:
        """All that it holds."""
        return [_packed(one) for one, _ in self._run(lambda cache: cache.exchange.held)]

    def lacks(self, prefixes: Sequence[Prefix]) -> list[bool]:
        """For each of these beginnings of prompts, whether it would have to compute some of it."""
        held = self.held()
        return [not any(one.serves(wanted) for one in held) for wanted in prefixes]

    def export_prefix(self, asked_for: Prefix) -> Payload | None:
        """The shortest prefix of that cache group with these first tokens. None if it is gone, or if
        saving it would keep running sequences waiting for longer than `max_stall_s`."""
        most_s = self._options.max_stall_s
        stored: StoredPrefix | None = self._run(
            lambda cache: cache.exchange.export_prefix(asked_for.group, asked_for.tokens, most_s)
        )
        if stored is None:
            return None
        prefix = Prefix(stored.group, packed(stored.tokens))
        marks = ((one.n_tokens, np.frombuffer(one.state, np.uint8)) for one in stored.checkpoints)
        return Payload(self.key, prefix, np.frombuffer(stored.state, np.uint8), tuple(marks))

    def import_prefix(self, payload: Payload, n_wanted: int) -> int:
        """Store another engine's prefix, of which the first `n_wanted` tokens are wanted: see
        `PrefixExchange.import_prefix`. Returns the bytes of what is stored now, 0 if it is nothing. The
        payload's memory may be freed then. Raises RefusedPrefixError if the payload cannot be used."""
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
            stored = self._run(lambda cache: cache.exchange.import_prefix(prefix, n_wanted))
        except DecodeError as error:
            raise RefusedPrefixError(str(error)) from error
        return 0 if stored is None else stored.n_bytes

    def _run(self, run: Callable[[KVCacheManager], Any]) -> Any:
        command = Command(run)
        self._run_between_steps(command)
        return command.future.result()


def _packed(held: CachedPrompt) -> Prefix:
    return Prefix(held.group, packed(held.tokens))
