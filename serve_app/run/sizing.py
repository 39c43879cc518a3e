"""Chooses slots, context and threads that fit a model and a machine, where the configuration names none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import ConfigError
from serve_app.base.formats import CacheType, LoadMode, block_size, n_bytes
from serve_app.config.schema import EngineConfig
from serve_app.kernels.llama.cache_sizes import CacheSizes
from serve_app.kernels.llama.model import Model

_MAX_DEFAULT_CTX = 4096
_MIN_DEFAULT_CTX = 1024
_MIN_DEFAULT_SLOTS, _MAX_DEFAULT_SLOTS = 8, 32
_SLOTS_PER_CORE = 4
# Of the memory that the weights leave; compute buffers, Python and the page cache get the rest.
_KV_SHARE_OF_MEMORY = 0.5
_SHARES_OF_MEMORY = {"cache_ram_bytes": 1 / 8, "checkpoint_ram_bytes": 1 / 16}
"""The parts of the memory beside the weights, by the engine's options that bound them."""
PROCESS_BYTES = 2**29
"""The memory of a replica beside weights and cache, at least: Python, Ray and compute buffers."""
# The memory that an encoder takes for each pair of a text's tokens, as measured: OpenVINO's masks are most.
_PAIR_BYTES = 20
# GGUF's numbers of file types whose matrices llama.cpp computes with as they are mapped: F32, F16, BF16.
# Most quantised ones it packs anew at the start, into memory of the process.
_MAPPED_FILE_TYPES = ("0", "1", "32")
_MAPPING_LOAD_MODES = ("auto", "mmap", "mlock", "mmap+mlock")
# The options that are measured, or read from the model's file, where the configuration says `auto`.
_MEASURED = ("flash_attn", "kv_unified", "embedding_pooling")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The properties of a model that sizing must know."""

    n_ctx_train: int
    """Tokens."""
    cache_elements: tuple[int, int]
    """Elements of one token's keys and values in the KV cache."""
    head_sizes: tuple[int, int]
    """Elements of one head's key and value."""
    weight_bytes: int
    mapped: bool = False
    """Whether replicas on one machine can share the weights as pages of the file."""
    window: int = 0
    """Tokens that some layers look back on."""
    window_share: float = 0.0
    """The part of the cache's elements that these layers have."""
    recurrent_bytes: int = 0
    """Bytes of one slot's recurrent layers."""
    is_encoder: bool = False
    """Whether tokens see the whole text, which is computed at once, and of which no cache is kept."""
    makes_vectors: bool = False
    """Whether the file says how a text's vectors become one."""
    draft_bytes: int = 0
    """Bytes that a draft takes for one slot. A draft model's weights are among `weight_bytes`."""

    @classmethod
    def of(cls, model: Model) -> ModelNeeds:
        """The needs of a model that is open without its weights. If llama.cpp tells no sizes, each layer
        counts as one with a cache for every token."""
        weight_bytes = sum(path.stat().st_size for path in model.files)
        mapped = model.meta("general.file_type") in _MAPPED_FILE_TYPES
        keys, values = (model.n_layer * n for n in model.layer_elements)
        sizes = model.cache_sizes or CacheSizes((keys, values), (0, 0), 0, 0)
        in_all = [a + b for a, b in zip(sizes.full, sizes.windowed, strict=True)]
        return cls(
            model.n_ctx_train,
            (in_all[0], in_all[1]),
            model.head_sizes,
            weight_bytes,
            mapped,
            sizes.window,
            sum(sizes.windowed) / max(1, sum(in_all)),
            sizes.recurrent_bytes,
            is_encoder=not model.is_causal,
            makes_vectors=model.pooling is not None,
        )

    def with_draft(self, draft: ModelNeeds, n_ctx: int) -> ModelNeeds:
        """The needs together with a draft model's, of which each slot holds so many tokens."""
        return replace(
            self,
            weight_bytes=self.weight_bytes + draft.weight_bytes,
            draft_bytes=n_ctx * draft.cache_bytes_per_token("f16", "f16"),
        )

    def shared_bytes(self, load_mode: LoadMode) -> int:
        """Bytes of weights that all replicas on a machine hold together; the rest, each has for itself."""
        return self.weight_bytes if self.mapped and load_mode in _MAPPING_LOAD_MODES else 0

    def cache_bytes_per_token(self, type_k: CacheType, type_v: CacheType) -> int:
        """Bytes of a token in the KV cache. Raises ConfigError if the format does not divide the heads."""
        total = 0
        for letter, name, elements, head in zip(
            "kv", (type_k, type_v), self.cache_elements, self.head_sizes, strict=True
        ):
            if head % block_size(name):
                raise ConfigError(
                    f"engine.cache_type_{letter}: {name} packs {block_size(name)} numbers into a block, "
                    f"which does not divide this model's heads of {head}"
                )
            total += n_bytes(name, elements)
        return total


@dataclass(frozen=True, slots=True)
class CacheNeeds:
    """The bytes that a KV cache takes: layers with a window have cells for that and for a batch."""

    full: float
    """Bytes of a token in the layers that see everything."""
    windowed: float
    """Bytes of a token in the layers with a window."""
    n_window: int
    """Tokens that the layers with a window have cells for."""
    of_slot: int
    """Bytes of each slot, whatever it holds."""

    @classmethod
    def of(cls, config: EngineConfig, needs: ModelNeeds) -> CacheNeeds:
        """The needs with the configured formats; an encoder has no cache. Raises ConfigError like
        `ModelNeeds.cache_bytes_per_token`."""
        if needs.is_encoder:
            return cls(0.0, 0.0, 0, 0)
        per_token = needs.cache_bytes_per_token(config.cache_type_k, config.cache_type_v)
        windowed = per_token * needs.window_share
        n_window = needs.window + config.n_batch
        of_slot = needs.recurrent_bytes + needs.draft_bytes
        return cls(per_token - windowed, windowed, n_window, of_slot)

    def n_bytes(self, n_slots: int, n_tokens: int) -> float:
        """Bytes of so many slots that hold so many tokens together."""
        in_window = min(n_tokens, n_slots * self.n_window)
        return n_slots * self.of_slot + n_tokens * self.full + in_window * self.windowed

    def n_tokens(self, n_bytes: float) -> float:
        """Tokens that a slot of so many bytes holds."""
        left, of_all = max(0.0, n_bytes - self.of_slot), self.full + self.windowed
        if not of_all:
            return math.inf
        if left <= self.n_window * of_all:
            return left / of_all
        return (left - self.n_window * self.windowed) / self.full if self.full else math.inf


Need = tuple[float, bool]
"""The bytes that a model can use, and whether its caches can use all that is left over."""
NOTHING: Need = (0.0, False)
UNKNOWN: Need = (math.inf, True)


def need(config: EngineConfig, needs: ModelNeeds, *, cores: int, n_replicas: int = 1) -> Need:
    """The memory with which `resolve` lowers nothing, of so many replicas on a machine with `cores` each.
    What is left over holds more prefixes. An encoder keeps none: it needs its weights, which OpenVINO may
    hold as floats of twice the size, and the longest text. Raises ConfigError like
    `ModelNeeds.cache_bytes_per_token`."""
    shared, own = needs.shared_bytes(config.load_mode), needs.weight_bytes
    if needs.is_encoder:
        n_tokens = min(config.n_ctx_slot or config.n_ctx or math.inf, needs.n_ctx_train)
        each = 2 * own + PROCESS_BYTES + _PAIR_BYTES * n_tokens**2 / _KV_SHARE_OF_MEMORY
        return shared + n_replicas * each, False
    n_slots = (config.n_slots or _slots_for(cores)) + len(config.system_prompts)
    n_ctx_slot = config.n_ctx_slot or min(needs.n_ctx_train, _MAX_DEFAULT_CTX)
    n_bytes = CacheNeeds.of(config, needs).n_bytes(n_slots, config.n_ctx or n_slots * n_ctx_slot)
    n_bytes *= 2 if needs.makes_vectors else 1
    each = own - shared + PROCESS_BYTES + n_bytes / _KV_SHARE_OF_MEMORY
    return shared + n_replicas * each, True


def divide(memory_bytes: int, needs: Sequence[Need]) -> list[int]:
    """Each model's part of the memory: what it needs, or an equal part of what those leave that need less.
    An UNKNOWN need is an equal part of all. What is left over goes to those that can use it. Pure."""
    of_all = memory_bytes // max(1, len(needs))
    needed = [of_all if n_bytes == math.inf else int(n_bytes) for n_bytes, _ in needs]
    parts, left = [0] * len(needs), memory_bytes
    for n, i in enumerate(sorted(range(len(needs)), key=needed.__getitem__)):
        parts[i] = min(needed[i], left // (len(needs) - n))
        left -= parts[i]
    growing = [i for i, (_, grows) in enumerate(needs) if grows]
    for i in growing:
        parts[i] += left // len(growing)
    return parts


def fitting_replicas(config: EngineConfig, needs: ModelNeeds, most: int, memory_bytes: int) -> int:
    """How many of `most` replicas so much memory has room for, at least 1. Each has the slots and the
    tokens that the configuration says, or the fewest that it should have."""
    n_slots, n_tokens = fewest_tokens(config, needs.n_ctx_train)
    cache_bytes = CacheNeeds.of(config, needs).n_bytes(n_slots, n_tokens)
    shared = needs.shared_bytes(config.load_mode)
    each = needs.weight_bytes - shared + cache_bytes + PROCESS_BYTES
    return max(1, min(most, int((memory_bytes - shared) // each)))


def fewest_tokens(config: EngineConfig, n_ctx_train: int) -> tuple[int, int]:
    """The slots, and the tokens of all of them together, that the configuration says, or the fewest that a
    replica should have."""
    n_slots = (config.n_slots or _MIN_DEFAULT_SLOTS) + len(config.system_prompts)
    n_ctx_slot = config.n_ctx_slot or min(n_ctx_train, _MIN_DEFAULT_CTX)
    return n_slots, config.n_ctx or n_slots * n_ctx_slot


def resolve(
    config: EngineConfig,
    needs: ModelNeeds | None,
    *,
    cores: int,
    memory_bytes: int,
    n_replicas: int = 1,
) -> EngineOptions:
    """Fill what the configuration leaves open, for so many replicas on a machine: each has its part of the
    memory, and `cores`.

    More slots share a step better, so slots give way last: each slot's share of the context first, down to
    1024 tokens, then slots. A request may be as long as all shares together. `needs` may be None if both
    are set. Raises ConfigError for what cannot work.
    """
    n_slots, n_ctx_slot, n_ctx = config.n_slots, config.n_ctx_slot, config.n_ctx
    left = _memory_left(config, needs, memory_bytes, n_replicas)
    if n_slots is None or n_ctx_slot is None:
        if needs is None:
            raise ConfigError(
                "engine.n_slots and engine.n_ctx_slot must both be set, because the model file is "
                "not on the machine that reads the configuration"
            )
        cache = CacheNeeds.of(config, needs)
        room = _KV_SHARE_OF_MEMORY * left if config.n_ctx is None else math.inf  # it is said
        if needs.makes_vectors and not needs.is_encoder:
            room /= 2  # a long text has a cache of its own
        n_pinned = len(config.system_prompts)
        if n_slots is None and n_ctx is None and config.kv_unified is not False:
            n_slots, n_ctx = _pool(n_ctx_slot or 0, cores, cache, room, n_pinned)
        n_slots, share = _fit(n_slots, n_ctx_slot, needs.n_ctx_train, cores, cache, room, n_pinned)
        if n_ctx_slot is None and config.kv_unified is False:
            n_ctx_slot = share
        elif n_ctx_slot is None:
            n_ctx = n_ctx or n_slots * share
            n_ctx_slot = min(needs.n_ctx_train, n_ctx)
    kept = left
    if needs is not None and needs.is_encoder:
        kept = 0  # it has no cache
        n_ctx_slot = _longest_text(config, needs.n_ctx_train, left)
        n_ctx = n_ctx and max(n_ctx, n_ctx_slot)
    said = {name: value for name, value in config if name in EngineOptions.__slots__}
    return EngineOptions(
        **said
        | {name: None for name in _MEASURED if said[name] == "auto"}
        | {name: int(part * kept) for name, part in _SHARES_OF_MEMORY.items()}
        | ({} if config.cache_ram_mib is None else {"cache_ram_bytes": config.cache_ram_mib << 20})
        | {
            "n_slots": n_slots,
            "n_ctx_slot": n_ctx_slot,
            "n_ctx": n_ctx,
            "threads": config.threads or cores,
            "max_waiting": 2 * n_slots if config.max_waiting is None else config.max_waiting,
            "draft": None,  # a replica has its file
            "own_layers": config.draft is not None and config.draft.own_layers,
            "prefix_folder": config.cache_folder,
        }
    )


def shares_of_memory(config: EngineConfig) -> tuple[str, ...]:
    """The options that `resolve` makes from the machine's memory, and not from the configuration."""
    configured = () if config.cache_ram_mib is None else ("cache_ram_bytes",)
    return tuple(name for name in _SHARES_OF_MEMORY if name not in configured)


def bound(options: EngineOptions, shares: Iterable[str], memory_bytes: int) -> EngineOptions:
    """The options with each of these `shares` bounded by its part of `memory_bytes`, which the weights
    leave of a node's available memory. The node may have less than the machine that read the configuration,
    and that machine may not know the weights."""
    return replace(
        options,
        **{
            name: min(getattr(options, name), int(_SHARES_OF_MEMORY[name] * max(0, memory_bytes)))
            for name in shares
        },
    )


def _memory_left(
    config: EngineConfig, needs: ModelNeeds | None, memory_bytes: int, n_replicas: int
) -> int:
    """The memory that the weights leave of one replica's part."""
    if needs is None:
        return memory_bytes // n_replicas
    shared = needs.shared_bytes(config.load_mode)
    of_one = (memory_bytes - shared) // n_replicas - (needs.weight_bytes - shared)
    return max(0, of_one)


def _longest_text(config: EngineConfig, n_ctx_train: int, left: int) -> int:
    """The tokens of a text for an encoder: as many as it was trained for, unless fewer are configured. Half
    of the memory must have room for one such text, which is computed alone."""
    if config.n_ctx_slot is not None:
        return min(config.n_ctx_slot, n_ctx_train)
    fitting = math.isqrt(int(_KV_SHARE_OF_MEMORY * left) // _PAIR_BYTES)
    return min(n_ctx_train, config.n_ctx or max(_MIN_DEFAULT_CTX, fitting))


def _pool(
    n_ctx_slot: int, cores: int, cache: CacheNeeds, room: float, n_pinned: int
) -> tuple[int | None, int | None]:
    """Slots that share the tokens for which so many bytes have room, and these tokens. One request may
    be longer than all can be at once; None and None where each slot has room. Each has its default
    share."""
    most = _slots_for(cores) + n_pinned
    n_ctx = most * cache.n_tokens(room / most)
    if not _MAX_DEFAULT_CTX < n_ctx_slot <= n_ctx < most * n_ctx_slot:
        return None, None
    n_ctx = int(n_ctx)
    return max(1, min(most, n_ctx // _MAX_DEFAULT_CTX) - n_pinned), n_ctx


def _slots_for(cores: int) -> int:
    return min(_MAX_DEFAULT_SLOTS, max(_MIN_DEFAULT_SLOTS, _SLOTS_PER_CORE * cores))


def _fit(
    n_slots: int | None,
    n_ctx_slot: int | None,
    n_ctx_train: int,
    cores: int,
    cache: CacheNeeds,
    room: float,
    pinned: int,
) -> tuple[int, int]:
    """Slots, and each one's share of the context, for which so many bytes have room beside pinned slots."""
    wanted_slots = _slots_for(cores)
    wanted_ctx = min(n_ctx_train, _MAX_DEFAULT_CTX)
    if n_ctx_slot is None:
        least = min(n_ctx_train, _MIN_DEFAULT_CTX)
        of_slot = cache.n_tokens(room / ((n_slots or wanted_slots) + pinned))
        n_ctx_slot = max(least, int(min(wanted_ctx, of_slot)))
    if n_slots is None:
        of_slot = max(1.0, cache.n_bytes(1, n_ctx_slot))
        n_slots = max(1, int(min(wanted_slots, room // of_slot - pinned)))
    return n_slots, n_ctx_slot
