"""The types of an engine's statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.base.values.adapters import may_start_from
from serve_app.engine.cache.packing import TOKEN_BYTES, common_prefix, pack


@dataclass(frozen=True, slots=True)
class SlotStats:
    """A slot at one moment."""

    id: int
    state: str
    """"idle", "prefill" or "decode"; "pinned" for a slot that keeps a system prompt."""
    request_id: str | None
    n_past: int
    """Tokens in the slot's KV cache; an idle slot keeps them for a prompt that begins alike."""
    n_prompt: int
    n_generated: int
    n_cached: int = 0
    """Tokens of the prompt that were found in the cache."""
    background: bool = False
    """Whether nobody waits for its request."""


@dataclass(frozen=True, slots=True)
class ComputeStats:
    """The kernels, the kind of attention and of cache, and the threads."""

    backend: str = "llama.cpp"
    """The library whose kernels compute the model: `llama.cpp` or `openvino`."""
    backend_reason: str = ""
    flash_attn: bool = False
    kv_unified: bool = False
    mode_reason: str = ""
    """The reason for `flash_attn` and `kv_unified`."""
    threads: int = 1
    """Threads for batches of one row. `threads_batch` are for larger ones."""
    threads_batch: int = 1


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The requests that run or wait; requests in the background are counted apart."""

    running: int = 0
    waiting: int = 0
    backlog_s: float = 0.0
    """Forecast of the seconds until all of these are done."""
    prefill_backlog_s: float = 0.0
    """The part of `backlog_s` that is missing of prompts."""
    first_end_s: float = 0.0
    """Forecast of the seconds until one of those that run ends."""
    background_running: int = 0
    background_waiting: int = 0
    background_backlog_s: float = 0.0
    draining: bool = False


@dataclass
class RequestStats:
    """The requests that have ended, and what happened to requests on their way."""

    ended: dict[str, int] = field(default_factory=Counter)
    preemptions: int = 0
    """Sequences that lost their slot for a time: the cache was full, or their client had more than its
    share."""
    context_shifts: int = 0
    failovers: int = 0
    """Requests that other engines began and could not end."""
    prefill_s: float = 0.0
    """Seconds of ended requests from their slot to their first token."""
    generation_s: float = 0.0
    """Seconds of ended requests from their first token to their end."""


@dataclass
class TokenStats:
    """Tokens of prompts and answers."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    """The part of `cached_tokens` that came back from the memory tier."""
    generated_tokens: int = 0
    n_tokens_max: int = 0
    """The most tokens that a sequence has had in the cache."""


@dataclass
class TimingStats:
    """The engine's steps and their batches."""

    steps: int = 0
    batches: int = 0
    """Forward passes of the backend."""
    busy_slots: int = 0
    """The sequences in each batch, summed over the batches."""
    step_s: float = 0.0
    decode_s: float = 0.0
    """The part of `step_s` in forward passes."""
    sample_s: float = 0.0
    """The part of `step_s` in sampling."""
    turn_s: float = 0.0
    """Turns on cores that other engines share: see `serve_app.base.sharing.turns`."""
    turn_wait_s: float = 0.0
    """The waits for these turns."""


@dataclass(frozen=True, slots=True)
class CostStats:
    """The cost model's present estimates."""

    step_time: dict[str, dict[int, float]] = field(default_factory=dict)
    """The time of a batch, in milliseconds: `decode_ms` by sequences, `prefill_ms` by a prompt's
    rows, `verify_ms` by one sequence's rows with drafts."""
    prompt_token_s: float = 0.0
    """Seconds of a prompt token; 0 if unknown."""
    token_s: float = 0.0
    """Seconds of a generated token with all slots busy; 0 if unknown."""
    answer_tokens: float = 0.0
    """Tokens of an answer, the newest answers counting most."""


@dataclass
class SpeculationStats:
    """Speculation: tokens that were guessed, and verified in one batch."""

    drafts: int = 0
    """Steps of sequences that had a draft."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """The part of `drafted_tokens` that was right; these tokens are among the generated tokens."""
    proposed_tokens: int = 0
    """The part of `drafted_tokens` that the draft model proposed."""
    accepted_proposed_tokens: int = 0
    draft_s: float = 0.0


@dataclass
class PictureStats:
    """Tiles of pictures, and sounds."""

    encoded_tiles: int = 0
    found_tiles: int = 0
    """Tiles that had been encoded for other requests."""
    encode_s: float = 0.0


@dataclass
class Counts(RequestStats, TokenStats, TimingStats, SpeculationStats, PictureStats):
    """A decoder loop's counters, of which `EngineStats` has copies by groups. Decoder thread only."""


@dataclass(frozen=True, slots=True)
class EmbeddingStats:
    """Texts that became vectors."""

    embedded_texts: int = 0
    embedded_tokens: int = 0
    embedding_batches: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Prefixes outside the slots: in the memory tier, in checkpoints, and on their way between replicas."""

    stored_prefixes: int = 0
    stored_bytes: int = 0
    stored_bytes_limit: int = 0
    """The most bytes that stored prefixes may take. They are not reserved."""
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    received_prefixes: int = 0
    received_bytes: int = 0
    sent_prefixes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ForecastStats:
    """How true the forecasts were that requests were accepted with. A ratio is that of the measured time to
    the forecast."""

    first_tokens: int = 0
    """First tokens that were forecast and came."""
    first_token_ratio: float = 0.0
    """The mean ratio; 0 before the first one."""
    first_tokens_close: float = 0.0
    """The part of them that came within 25% of the forecast."""
    ends: int = 0
    end_ratio: float = 0.0
    ends_close: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes that the model takes."""

    weights_bytes: int = 0
    cache_bytes: int = 0
    """The cache of all slots, pinned slots included."""
    cache_bytes_per_slot: int = 0
    """The bytes that one more slot would take."""
    compute_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment; counters run from its start."""

    n_slots: int
    n_ctx_slot: int
    """Tokens that a request may have."""
    n_ctx: int
    """Tokens that all slots hold together."""
    compute: ComputeStats = ComputeStats()
    queue: QueueStats = QueueStats()
    requests: RequestStats = field(default_factory=RequestStats)
    tokens: TokenStats = field(default_factory=TokenStats)
    timing: TimingStats = field(default_factory=TimingStats)
    costs: CostStats = field(default_factory=CostStats)
    forecasts: ForecastStats = ForecastStats()
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    pictures: PictureStats = field(default_factory=PictureStats)
    embeddings: EmbeddingStats = EmbeddingStats()
    cache: CacheStats = CacheStats()
    memory: MemoryStats = MemoryStats()
    slots: tuple[SlotStats, ...] = ()

    def memory_report(self) -> str:
        """A line about what the engine holds, and would hold with more slots."""
        memory = self.memory
        if not memory.cache_bytes:  # an encoder's
            return (
                f"weights {_mib(memory.weights_bytes)}, no cache, "
                f"compute buffers {_mib(memory.compute_bytes)}"
            )
        return (
            f"weights {_mib(memory.weights_bytes)}, KV cache {_mib(memory.cache_bytes)} "
            f"({_mib(memory.cache_bytes_per_slot)} for every slot more), "
            f"compute buffers {_mib(memory.compute_bytes)}, "
            f"prefixes without a slot {_mib(self.cache.stored_bytes_limit)} at most"
        )


class CachedPrompt(NamedTuple):
    """A prefix that prompts of one cache group could start from."""

    group: str
    """The prompts' cache group; SHARED_GROUP for what is pinned."""
    tokens: Sequence[int]


_HEAD = 32
"""The first tokens that a prefix must share with a prompt before the rest is compared."""


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """The prefixes that new prompts could start from, at one moment. Immutable: any thread may look for
    as long as it likes."""

    prompts: tuple[CachedPrompt, ...] = ()
    """The prefixes in the cache, stored, or about to be computed; those worth most first."""
    taken: tuple[str, ...] = ()
    """The requests that were taken in last, which statistics of the same moment include."""
    adapters: frozenset[str] = frozenset()
    """The adapters of the requests that run or wait, by `adapters_of`: each of
    these has steps of its own."""

    def n_cached(self, group: str, prompt: bytes) -> int:
        """The most first tokens of a packed prompt of that content group that it could start from."""
        head = prompt[: _HEAD * TOKEN_BYTES]
        return max(
            (
                common_prefix(pack(tokens), prompt) // TOKEN_BYTES
                for held, tokens in self.prompts
                if pack(tokens[:_HEAD]) == head and may_start_from(group, held)
            ),
            default=0,
        )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"
