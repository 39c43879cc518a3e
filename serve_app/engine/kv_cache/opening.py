"""Makes the KV cache's manager, with its slots and tiers, for one backend."""

from __future__ import annotations

import math

from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.autotune.modes import Mode
from serve_app.engine.backends.base import Backend
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.kv_cache.checkpoints import Checkpoints
from serve_app.engine.kv_cache.disk_tier import DiskTier
from serve_app.engine.kv_cache.manager import KVCacheManager
from serve_app.engine.kv_cache.memory_tier import MemoryTier
from serve_app.engine.kv_cache.prefix_index import PrefixIndex
from serve_app.engine.kv_cache.slots import SlotTable
from serve_app.engine.options import EngineOptions

# Fewer tokens than this are not worth copying, however short the slot.
_LEAST_COPY = 16


def min_copy(costs: CostModel) -> int:
    """Tokens from which on copying a slot takes less than computing them."""
    token_s = costs.prompt_token_s
    return max(_LEAST_COPY, math.ceil(costs.copy_s / token_s) if token_s else 0)


def slot_room(options: EngineOptions, mode: Mode) -> int:
    """Tokens that a slot has cells for in a cache of that kind."""
    return options.n_ctx_slot if mode.mixes else options.n_ctx_share


def open_cache(
    backend: Backend, costs: CostModel, options: EngineOptions, budget: StepBudget
) -> KVCacheManager:
    """The manager, with a disk tier if there is a folder for one. Decoder thread only; waits for the disk.
    Raises ConfigError if the folder cannot be used."""
    index = PrefixIndex()
    checkpoints = Checkpoints(backend, options.n_checkpoints, options.checkpoint_ram_bytes)
    table = SlotTable(
        options.n_slots,
        min_copy(costs),
        options.pinned,
        room=slot_room(options, backend.setup.mode),
        consecutive=not backend.setup.mode.mixes,
        index=index,
        resumable=checkpoints.resumable,
    )
    disk_tier = None
    if options.prefix_folder is not None and options.cache_ram_bytes:
        disk_tier = DiskTier(options.prefix_folder, backend.states.key)
    kept = disk_tier.load(options.cache_ram_bytes) if disk_tier else ()
    memory_tier = MemoryTier(
        options.cache_ram_bytes, kept, disk_tier, index, forgets=backend.traits.forgets
    )
    cache = KVCacheManager(backend, table, memory_tier, budget, checkpoints)
    cache.disk_tier = disk_tier
    cache.n_pool = options.n_ctx if options.is_pooled else None
    return cache
