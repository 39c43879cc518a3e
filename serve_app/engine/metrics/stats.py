"""The types of an engine's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SlotStats:
    """One slot at one moment."""

    id: int
    state: str
    """"idle", "prefill" or "decode"; "pinned" for a slot that keeps a system prompt."""
    request_id: str | None
    n_past: int
    """Tokens in the slot's KV cache; an idle slot keeps them for a prompt that begins alike."""
    n_prompt: int
    n_generated: int
    n_cached: int = 0
    """Of its prompt, the tokens that were found in the cache."""
    background: bool = False
    """Whether nobody waits for its request."""


@dataclass
class Counts:
    """A decoder loop's counters; see the fields of the same names in `EngineStats`. Its thread
    only."""

    steps: int = 0
    batches: int = 0
    busy_slots: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    proposed_tokens: int = 0
    accepted_proposed_tokens: int = 0
    n_tokens_max: int = 0
    preemptions: int = 0
    context_shifts: int = 0
    failovers: int = 0
    step_s: float = 0.0
    decode_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0
    prefill_s: float = 0.0
    generation_s: float = 0.0
    encoded_tiles: int = 0
    found_tiles: int = 0
    encode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine at one moment; counters run from its start."""

    n_slots: int
    n_ctx_slot: int
    threads: int
    """For batches of one row; for those of 2 to 16, `threads_few`; for those of more, `threads_batch`."""
    threads_batch: int
    backend: str
    """Whose kernels compute the model, `llama.cpp` or `openvino`, ..."""
    backend_reason: str
    """... and why."""
    flash_attn: bool
    kv_unified: bool
    mode_reason: str
    """Why it is so."""
    running: int
    """Requests with a slot; and those that wait for one. Requests in the background are not in these."""
    waiting: int
    backlog_s: float
    """Forecast of the seconds until all these would be done."""
    draining: bool
    steps: int
    prompt_tokens: int
    """Prompt tokens that were computed; those found in the cache are `cached_tokens`."""
    cached_tokens: int
    generated_tokens: int
    drafts: int = 0
    """Steps of sequences that were speculated."""
    drafted_tokens: int = 0
    """Guesses of speculation; of them, `accepted_tokens` were right, and are among the generated."""
    accepted_tokens: int = 0
    proposed_tokens: int = 0
    """Of the drafted ones, those that the draft model proposed, in `draft_s` seconds; of them,
    `accepted_proposed_tokens` were right."""
    accepted_proposed_tokens: int = 0
    draft_s: float = 0.0
    preemptions: int = 0
    """Sequences that lost their slot for a time: the cache was full, or their client had more than its
    share."""
    context_shifts: int = 0
    embedded_texts: int = 0
    """Texts that became vectors, and their tokens, in so many batches."""
    embedded_tokens: int = 0
    embedding_batches: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    """Requests by the reason of their end."""
    step_s: float = 0.0
    """Seconds spent in steps; of them, `decode_s` in forward passes and `sample_s` in sampling."""
    decode_s: float = 0.0
    sample_s: float = 0.0
    batches: int = 0
    """Calls of llama.cpp; `busy_slots` counts the sequences in each."""
    busy_slots: int = 0
    prefill_s: float = 0.0
    """Of all requests that ended: seconds from a slot to the first token, and from there to the end."""
    generation_s: float = 0.0
    n_tokens_max: int = 0
    """The most tokens that a sequence has had in the cache."""
    failovers: int = 0
    """Requests that other engines began and could not end."""
    encoded_tiles: int = 0
    """Parts of pictures that were encoded, in `encode_s` seconds; `found_tiles` had been for others."""
    found_tiles: int = 0
    encode_s: float = 0.0
    restored_tokens: int = 0
    """Of the cached tokens, those that came back from the memory tier."""
    stored_prefixes: int = 0
    """Prefixes that lost their slot and are kept in memory."""
    stored_bytes: int = 0
    stored_bytes_limit: int = 0
    """The most bytes that they may take, which are not reserved."""
    checkpoints: int = 0
    """Of slots, and their bytes: see `serve_app.engine.kv_cache.checkpoints`."""
    checkpoint_bytes: int = 0
    received_prefixes: int = 0
    """Prefixes that other engines computed, and the bytes of their states."""
    received_bytes: int = 0
    sent_prefixes: int = 0
    """Prefixes that were sent to other engines."""
    sent_bytes: int = 0
    weights_bytes: int = 0
    cache_bytes: int = 0
    """Of all slots, pinned ones included."""
    cache_bytes_per_slot: int = 0
    """The bytes that one more slot would take."""
    compute_bytes: int = 0
    """Buffers that batches are computed in."""
    step_time: dict[str, dict[int, float]] = field(default_factory=dict)
    """The time of a batch, in milliseconds: `decode_ms` by sequences, `prefill_ms` by a prompt's
    rows, `verify_ms` by one sequence's rows with drafts."""
    threads_few: int = 0
    threads_reason: str = ""
    """Why so many."""
    slots: tuple[SlotStats, ...] = ()
    prefill_backlog_s: float = 0.0
    """Of `backlog_s`, what is missing of prompts."""
    prompt_token_s: float = 0.0
    """Measured seconds of a prompt token, and of a generated one with all slots busy; 0 if unknown."""
    token_s: float = 0.0
    answer_tokens: float = 0.0
    """Tokens that answers have had, the newest counting most."""
    background_running: int = 0
    """The same three for requests in the background."""
    background_waiting: int = 0
    background_backlog_s: float = 0.0

    def memory_report(self) -> str:
        """One line about what the engine holds, and would hold with more slots."""
        return (
            f"weights {_mib(self.weights_bytes)}, KV cache {_mib(self.cache_bytes)} "
            f"({_mib(self.cache_bytes_per_slot)} for every slot more), "
            f"compute buffers {_mib(self.compute_bytes)}, "
            f"prefixes without a slot {_mib(self.stored_bytes_limit)} at most"
        )


class CachedPrompt(NamedTuple):
    """A prefix that prompts of one cache group could start from."""

    group: str
    """See `serve_app.types.GenerationRequest.cache_group`; SHARED_GROUP for what is pinned."""
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """Where new prompts could start from, at one moment. Immutable: any thread may look for as long as it
    likes."""

    prompts: tuple[CachedPrompt, ...] = ()
    """The prefixes in the cache, stored, or about to be computed; those worth most first."""
    taken: tuple[str, ...] = ()
    """The requests that were taken in last, which statistics of the same moment include."""
    adapters: frozenset[str] = frozenset()
    """The adapters of the requests that run or wait, by `serve_app.types.adapters_of`: each of
    these has steps of its own."""


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"
