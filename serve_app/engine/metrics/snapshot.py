"""An engine's statistics at one moment, from the parts that know them, and when they are made.

Other threads read them, and most steps change little: so they are made when they may be read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from serve_app.engine.cache.slots import Slot
from serve_app.engine.metrics.stats import (
    CachedPrefixes,
    CacheStats,
    ComputeStats,
    CostStats,
    EmbeddingStats,
    EngineStats,
    MemoryStats,
    PictureStats,
    QueueStats,
    RequestStats,
    SlotStats,
    SpeculationStats,
    TimingStats,
    TokenStats,
)
from serve_app.engine.policy.forecast import Forecast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from serve_app.engine.core.engine_core import EngineCore

_EVERY_S = 0.5
"""The oldest that anything is while the engine works."""


class View(NamedTuple):
    """The loop at one moment. Immutable."""

    stats: EngineStats
    cached_prefixes: CachedPrefixes
    forecast: Forecast


class Published:
    """The newest view. Any thread reads it; the decoder thread makes it.

    A new one is made when something has changed but the number of tokens, when somebody has read the last
    one, and after _EVERY_S.
    """

    def __init__(self, make: Callable[[], View]) -> None:
        self._make = make
        self._is_read = False
        self.refresh()

    @property
    def view(self) -> View:
        """The newest one. The next step makes another."""
        self._is_read = True
        return self._view

    def refresh(self) -> None:
        """Decoder thread: make it now."""
        self._is_read = False
        self._view = self._make()
        self._made = time.monotonic()

    def on_step(self, *, changed: bool) -> None:
        """Decoder thread: a step is over, which `changed` something or only brought tokens."""
        if changed or self._is_read or time.monotonic() >= self._made + _EVERY_S:
            self.refresh()


_Group = TypeVar("_Group", bound="DataclassInstance")


def engine_stats(core: EngineCore, forecast: Forecast) -> EngineStats:
    """A snapshot: it does not change with its parts."""
    options, cache, counts = core.options, core.cache, core.counts
    backend, shape = core.backend, core.backend.embeddings.shape
    guests = Counter({name: n for guest in core.guests for name, n in guest.counts.items()})
    mode = backend.cache_plan.mode
    n_running, n_waiting = (
        Counter(one.request.background for one in them)
        for them in (core.running, core.admission.waiting)
    )
    return EngineStats(
        n_slots=options.n_slots,
        n_ctx_slot=options.n_ctx_slot if shape.causal else shape.n_text,
        n_ctx=options.n_ctx_together,
        compute=ComputeStats(
            backend=backend.plan.kernels.backend,
            backend_reason=str(backend.plan),
            flash_attn=mode.flash_attn,
            kv_unified=mode.kv_unified,
            mode_reason=backend.cache_plan.reason,
            threads=options.threads_of(1),
            threads_batch=options.threads_of(2),
        ),
        queue=QueueStats(
            running=n_running[False],
            waiting=n_waiting[False],
            backlog_s=round(forecast.work_s, 3),
            prefill_backlog_s=round(forecast.prefill_s, 3),
            first_end_s=round(forecast.first_end_s, 3),
            background_running=n_running[True],
            background_waiting=n_waiting[True],
            background_backlog_s=round(forecast.background_s, 3),
            draining=core.steps.is_draining,
        ),
        requests=_group(RequestStats, counts, ended=dict(counts.ended)),
        tokens=_group(TokenStats, counts),
        timing=_group(TimingStats, counts),
        costs=CostStats(
            step_time=core.costs.curve(),
            prompt_token_s=forecast.prompt_token_s,
            token_s=forecast.token_s,
            answer_tokens=round(forecast.n_generated, 1),
        ),
        forecasts=core.backlog.stats,
        speculation=_group(SpeculationStats, counts),
        pictures=_group(PictureStats, counts),
        embeddings=EmbeddingStats(guests["texts"], guests["tokens"], guests["batches"]),
        cache=CacheStats(
            stored_prefixes=len(cache.memory_tier),
            stored_bytes=cache.memory_tier.n_bytes,
            stored_bytes_limit=options.cache_ram_bytes,
            checkpoints=len(cache.checkpoints),
            checkpoint_bytes=cache.checkpoints.n_bytes,
            **cache.transferred,
        ),
        memory=_group(MemoryStats, core.backend.memory),
        slots=tuple(_slot_stats(slot) for slot in cache.table.slots),
    )


def _group(kind: type[_Group], source: object, **others: object) -> _Group:
    """The group of statistics whose fields `source` has by the same names."""
    names = (name for name in _names(kind) if name not in others)
    return kind(**{name: getattr(source, name) for name in names}, **others)


@cache
def _names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _slot_stats(slot: Slot) -> SlotStats:
    sequence = slot.sequence
    if sequence is None:
        state = "pinned" if slot.pinned else "idle"
        return SlotStats(slot.id, state, None, slot.n_past, 0, 0)
    return SlotStats(
        slot.id,
        sequence.state.value,
        sequence.id,
        sequence.n_past,
        sequence.n_prompt,
        sequence.n_generated,
        sequence.n_cached,
        sequence.request.background,
    )
