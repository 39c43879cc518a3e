"""What an engine tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SlotStats:
    """One slot at one moment."""

    id: int
    state: str
    """"idle", "prefill" or "decode"; "pinned" for a lane that keeps a system prompt."""
    request_id: str | None
    n_past: int
    """Tokens in the slot's KV cache; an idle slot keeps them for a prompt that begins alike."""
    n_prompt: int
    n_generated: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine at one moment; counters run from its start."""

    n_slots: int
    n_ctx_slot: int
    threads: int
    running: int
    waiting: int
    draining: bool
    steps: int
    prompt_tokens: int
    """Prompt tokens that were computed; those found in the cache are `cached_tokens`."""
    cached_tokens: int
    generated_tokens: int
    ended: dict[str, int] = field(default_factory=dict)
    """Requests by the reason of their end."""
    restored_tokens: int = 0
    """Of the cached tokens, those that came back from the prefix store."""
    stored_prefixes: int = 0
    """Prefixes that lost their slot and are kept in memory."""
    stored_bytes: int = 0
    weights_bytes: int = 0
    cache_bytes: int = 0
    """Of all slots and pinned lanes."""
    cache_bytes_per_slot: int = 0
    """What one slot more would cost."""
    step_time: dict[str, dict[int, float]] = field(default_factory=dict)
    """What a pass costs, in milliseconds: `decode_ms` by sequences, `prefill_ms` by prompt rows."""
    slots: tuple[SlotStats, ...] = ()
