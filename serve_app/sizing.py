"""Slots, context and threads that fit a model and a machine, where the configuration leaves them open."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.config import EngineConfig
from serve_app.engine.options import EngineOptions
from serve_app.errors import ConfigError
from serve_app.llama.model import Model

_MAX_DEFAULT_CTX = 4096
_MIN_DEFAULT_CTX = 1024
_MIN_DEFAULT_SLOTS, _MAX_DEFAULT_SLOTS = 8, 32
_SLOTS_PER_CORE = 4
# Of the memory that the weights leave; compute buffers, Python and the page cache get the rest.
_KV_SHARE_OF_MEMORY = 0.5
_BYTES_PER_F16 = 2


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What sizing must know of a model."""

    n_ctx_train: int
    """Tokens."""
    kv_bytes_per_token: int
    weight_bytes: int

    @classmethod
    def of(cls, model: Model) -> ModelNeeds:
        """Read from a GGUF's metadata; the vocabulary is enough. An upper bound for models that
        keep only a window of their context."""
        n_head = model.meta_int("attention.head_count", 1)
        head_dim = model.meta_int("embedding_length", 1) // max(1, n_head)
        key = model.meta_int("attention.key_length", head_dim)
        value = model.meta_int("attention.value_length", head_dim)
        n_head_kv = model.meta_int("attention.head_count_kv", n_head)
        return cls(
            n_ctx_train=model.n_ctx_train,
            kv_bytes_per_token=model.meta_int("block_count", 1)
            * n_head_kv
            * (key + value)
            * _BYTES_PER_F16,
            weight_bytes=model.path.stat().st_size,
        )


def resolve(
    config: EngineConfig, needs: ModelNeeds | None, *, cores: int, memory_bytes: int
) -> EngineOptions:
    """Fill what the configuration leaves open.

    More slots share a step better, so slots give way last: context first, down to 1024 tokens, then
    slots. `needs` may be None if both are set. Raises ConfigError for what cannot work.
    """
    n_slots, n_ctx_slot = config.n_slots, config.n_ctx_slot
    if n_slots is None or n_ctx_slot is None:
        if needs is None:
            raise ConfigError(
                "engine.n_slots and engine.n_ctx_slot must both be set, because the model file is "
                "not on the machine that reads the configuration"
            )
        n_slots, n_ctx_slot = _fit(n_slots, n_ctx_slot, needs, cores, memory_bytes)
    return EngineOptions(
        n_slots=n_slots,
        n_ctx_slot=n_ctx_slot,
        threads=config.threads or cores,
        n_batch=config.n_batch,
        max_waiting=2 * n_slots if config.max_waiting is None else config.max_waiting,
        flash_attn=config.flash_attn,
        max_stall_s=None if config.max_stall_ms is None else config.max_stall_ms / 1000,
    )


def _fit(
    n_slots: int | None, n_ctx_slot: int | None, needs: ModelNeeds, cores: int, memory_bytes: int
) -> tuple[int, int]:
    kv_bytes = int(_KV_SHARE_OF_MEMORY * max(0, memory_bytes - needs.weight_bytes))
    tokens = kv_bytes // needs.kv_bytes_per_token
    wanted_slots = min(_MAX_DEFAULT_SLOTS, max(_MIN_DEFAULT_SLOTS, _SLOTS_PER_CORE * cores))
    wanted_ctx = min(needs.n_ctx_train, _MAX_DEFAULT_CTX)
    if n_ctx_slot is None:
        least = min(needs.n_ctx_train, _MIN_DEFAULT_CTX)
        n_ctx_slot = max(least, min(wanted_ctx, tokens // (n_slots or wanted_slots)))
    if n_slots is None:
        n_slots = max(1, min(wanted_slots, tokens // n_ctx_slot))
    return n_slots, n_ctx_slot
