"""What an engine is made with: plain numbers, all decided."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.errors import ConfigError
from serve_app.llama.formats import CacheType, LoadMode, block_size


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes of one engine. Raises ConfigError for those that cannot work."""

    n_slots: int
    """Sequences that run at once."""
    n_ctx_slot: int
    """Tokens, prompt and answer together, that one slot holds."""
    threads: int
    """Threads that llama.cpp computes with."""
    n_batch: int = 512
    """Most prompt tokens in one step; each decoding sequence's next token comes on top."""
    max_waiting: int = 16
    """Requests that may wait for a slot; the next one is refused."""
    flash_attn: bool = True
    pinned: tuple[tuple[int, ...], ...] = ()
    """Beginnings of prompts, as token ids: computed at the start, and kept in lanes of their own."""
    cache_ram_bytes: int = 0
    """Memory for prefixes that lost their slot; 0 keeps none."""
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    load_mode: LoadMode = "auto"
    max_stall_s: float | None = None
    """Longest time that a running sequence should wait between two tokens because of others'
    prompts; None sets no bound."""

    def __post_init__(self) -> None:
        for name in ("n_slots", "threads", "n_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be at least 1.")
        if self.n_ctx_slot < 2:
            raise ConfigError("engine.n_ctx_slot must be at least 2: a prompt token and an answer.")
        if not all(0 < len(prefix) < self.n_ctx_slot for prefix in self.pinned):
            raise ConfigError("engine.system_prompts: one is empty, or does not fit n_ctx_slot.")
        if block_size(self.cache_type_v) > 1 and not self.flash_attn:
            raise ConfigError(
                f"engine.cache_type_v: {self.cache_type_v} needs engine.flash_attn: true."
            )
        if self.max_stall_s is not None and self.max_stall_s <= 0:
            raise ConfigError("engine.max_stall_ms must be above 0.")
        if self.max_waiting < 0:
            raise ConfigError("engine.max_waiting must not be negative.")
