"""The engine's options: plain numbers, all decided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve_app.base.errors import ConfigError
from serve_app.base.formats import (
    BackendName,
    CacheType,
    EmbeddingPooling,
    LoadMode,
    NumaStrategy,
    Quantization,
    block_size,
)

KernelsName = Literal["llama.cpp", "openvino"]
MAX_STALL_MS: float = 250
"""The longest that streams wait for others' prompts, in milliseconds, if nothing else is configured."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    id: str
    path: Path


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes of one engine. Raises ConfigError for those that cannot work together.

    A field that `serve_app.config.schema.EngineConfig` has by the same name means the same, and its bounds
    are checked there. None stands for `auto`.
    """

    n_slots: int
    n_ctx_slot: int
    threads: int
    """Threads with which llama.cpp computes a batch of one row."""
    threads_batch: int | None = None
    """Threads for batches of more rows; None: the same."""
    computing_cpus: tuple[int, ...] | None = None
    """CPUs that the threads which compute keep to; None: all that the process may use."""
    turns: Path | None = None
    """The file of those that share these CPUs, one engine computing at a time; None: they are its own."""
    numa: NumaStrategy | None = None
    n_batch: int = 512
    max_waiting: int = 16
    max_first_token_s: float | None = None
    n_ctx: int | None = None
    """Tokens that all slots hold together; None: `n_ctx_slot` each. A request that is longer than
    `n_ctx_share` needs a unified or paged KV cache."""
    flash_attn: bool | None = None
    kv_unified: bool | None = None
    pinned: tuple[tuple[int, ...], ...] = ()
    """Beginnings of prompts, as token ids: computed at the start, and kept in slots of their own."""
    cache_ram_bytes: int = 0
    """Memory for prefixes that lost their slot; 0 keeps none."""
    checkpoint_ram_bytes: int = 2**30
    """Memory for the checkpoints of all slots, and for past states; 0 makes no checkpoints."""
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    quantization: Quantization = "auto"
    load_mode: LoadMode = "auto"
    memory_bytes: int | None = None
    """Memory that the engine can take; None: enough for weights in both layouts."""
    backend: BackendName = "llama.cpp"
    max_converted_bytes: int | None = None
    """The most bytes of models that are converted for OpenVINO; None for what the disk has room for."""
    max_stall_ms: float = MAX_STALL_MS
    """Longest time that a running sequence should wait between two tokens because of others'
    prompts; infinite sets no bound."""
    speculate: bool = True
    context_shift: bool = False
    n_keep: int = 0
    embedding_pooling: EmbeddingPooling | None = None
    profile_limit_s: float = 27.0
    """Most seconds at the start for profiling, which measures what batches cost; 0 measures nothing."""
    profile_folder: Path | None = None
    """The folder where profiles are kept for the next start."""
    measures_again: bool = True
    """Whether a profile that other programs disturbed is measured again at the next start. If not, what is
    learned while serving betters it."""
    prefix_folder: Path | None = None
    """The folder where the prefixes that lost their slot are kept for the next start."""
    slot_folder: Path | None = None

    adapters: tuple[AdapterFile, ...] = ()
    """LoRA adapters that requests may ask for."""
    projector: Path | None = None
    """A GGUF file with what the model sees or hears with; None: it reads text only."""
    draft: Path | None = None
    """A GGUF file with a small model of the same vocabulary, which proposes tokens; None: none does."""
    own_layers: bool = False
    """Whether the model's own prediction layers propose tokens."""
    picture_ram_bytes: int = 2**27
    """Memory for pictures and sounds that are encoded."""

    def __post_init__(self) -> None:
        if not all(0 < len(prefix) < self.n_ctx_slot for prefix in self.pinned):
            raise ConfigError("engine.system_prompts: one is empty, or does not fit n_ctx_slot.")
        if block_size(self.cache_type_v) > 1 and self.flash_attn is False:
            raise ConfigError(
                f"engine.cache_type_v: {self.cache_type_v} needs engine.flash_attn: true."
            )
        if self.n_ctx is not None:
            if self.kv_unified is False:
                raise ConfigError(
                    "engine.n_ctx is for a unified cache: leave out kv_unified: false."
                )
            if self.n_ctx < self.n_ctx_slot:
                raise ConfigError("engine.n_ctx must not be below engine.n_ctx_slot.")
        if self.quantization == "w8a8" and self.backend != "openvino":
            raise ConfigError("engine.quantization: w8a8 needs engine.backend: openvino.")
        if self.backend == "openvino" and (names := self.unsupported_by_openvino()):
            raise ConfigError(f"engine.backend: openvino does not support {names[0]}.")

    @property
    def n_ctx_share(self) -> int:
        """Tokens that each slot has room for in a split KV cache."""
        if self.n_ctx is None:
            return self.n_ctx_slot
        return max(2, min(self.n_ctx_slot, self.n_ctx // self.n_slots))

    @property
    def n_ctx_together(self) -> int:
        """Tokens that all slots hold together."""
        return self.n_ctx or self.n_slots * self.n_ctx_slot

    @property
    def is_pooled(self) -> bool:
        """Whether a request may be longer than a slot's share."""
        return self.n_ctx_share < self.n_ctx_slot

    def threads_of(self, n_rows: int) -> int:
        """The threads that compute a batch of so many rows."""
        return self.threads if n_rows == 1 else self.threads_batch or self.threads

    def unsupported_by_openvino(self) -> list[str]:
        """The names of those options here that OpenVINO's backend lacks."""
        types = (self.cache_type_k, self.cache_type_v)
        refused = {
            "adapters": bool(self.adapters),
            "projector": self.projector is not None,
            "engine.draft.own_layers": self.own_layers,
            "engine.kv_unified": self.kv_unified is not None,
            "engine.flash_attn: false": self.flash_attn is False,
            "engine.numa": self.numa is not None,
            "engine.threads_batch": self.threads_batch not in (None, self.threads),
            "engine.cache_type_k and engine.cache_type_v but both f16, both bf16 or both q8_0": (
                types not in (("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"))
            ),
        }
        return [name for name, is_set in refused.items() if is_set]
