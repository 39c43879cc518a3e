"""The values that cross the Serve handle between ingress and engine: plain, frozen, picklable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from serve_app.base.errors import CorralError
from serve_app.base.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted request gets exactly one."""

    STOP = "stop"
    """The model ended its turn, or a stop string was found."""
    LENGTH = "length"
    """`max_tokens` was reached, or the slot's context is full."""
    ABORT = "abort"
    """The client left, or asked for the end."""
    ERROR = "error"
    """The engine failed; `SequenceEnd.error` says how."""


SHARED_GROUP = "*"
"""The cache group of what all groups may start from: the system prompts of the configuration."""


class AdapterUse(NamedTuple):
    """A LoRA adapter that a request is computed with."""

    id: str
    scale: float
    version: str = ""
    """A hash of the file of an adapter that was loaded while serving: another file may get the same name
    later. Empty for the adapters of the configuration."""

    @property
    def key(self) -> str:
        return f"{self.id}@{self.version}" if self.version else self.id


Adapters = tuple[AdapterUse, ...]
"""The adapters that a request is computed with, by id and without those of scale 0; none: the model
itself."""

_ADAPTED = "\0"
"""Stands between a cache group and the adapters; neither has it."""


def adapters_of(content_group: str) -> str:
    """The adapters' part of a content group: equal for those of one step, and empty without any."""
    _, separator, used = content_group.partition(_ADAPTED)
    return separator + used


def may_start_from(group: str, held: str) -> bool:
    """Whether prompts of that content group may start from what is held for that one."""
    return held == group or (held == SHARED_GROUP and _ADAPTED not in group)


MEDIUM = -1
"""Stands in a prompt for the next one of its pictures and sounds. No vocabulary has negative tokens."""

SAMPLE_RATE = 16_000
"""Samples of a second of sound: as many as models that hear are made for."""

Size = tuple[int, ...]
"""Width and height of a picture, or how many samples a sound has."""


class Picture(msgspec.Struct, frozen=True, tag=True):
    """A picture that is decoded."""

    key: bytes
    """A hash of its size and pixels."""
    width: int
    height: int
    pixels: bytes
    """Rows from the top, of red, green and blue: a byte each."""

    @classmethod
    def of(cls, pixels: bytes, width: int, height: int) -> Picture:
        size = b"%d %d " % (width, height)
        return cls(blake2b(size + pixels, digest_size=32).digest(), width, height, pixels)

    @property
    def size(self) -> Size:
        return self.width, self.height


class Sound(msgspec.Struct, frozen=True, tag=True):
    """A sound that is decoded."""

    key: bytes
    """A hash of its samples."""
    samples: bytes
    """The samples of one channel, SAMPLE_RATE a second, from -1 to 1: floats of four bytes."""

    @classmethod
    def of(cls, samples: bytes) -> Sound:
        return cls(blake2b(samples, digest_size=32, person=b"sound").digest(), samples)

    @property
    def size(self) -> Size:
        return (len(self.samples) // 4,)


Medium = Picture | Sound


def account(client: str, *, background: bool) -> str:
    return f"{client}\0background" if background else client


class Deadline(NamedTuple):
    """The seconds within which a client wants its first token, and the end of its answer."""

    first_token_s: float = math.inf
    end_s: float = math.inf

    def after(self, seconds: float) -> Deadline:
        """The deadline as it is so many seconds later."""
        return Deadline(self.first_token_s - seconds, self.end_s - seconds)


NO_DEADLINE = Deadline()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue. `id` is unique among the engine's live requests."""

    id: str
    prompt: tuple[int, ...]
    """Token ids of the model's own vocabulary: at least one, and fewer than a slot's context. MEDIUM stands
    for each of `media` until an engine puts its tokens there."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    client: str = ""
    """The client that sent the request: slots are shared fairly among clients."""
    priority: int = 0
    """Lower ones get a slot first, as in vLLM."""
    context_shift: bool | None = None
    """Whether it goes on when its context is full, with its oldest tokens dropped, if it has
    `max_tokens`; None: as the engine's options say."""
    n_keep: int | None = None
    """First tokens that a context shift keeps; -1: the prompt; None: as the engine's options say."""
    http_id: str = ""
    generated: tuple[int, ...] = ()
    """The first tokens of the answer, which other replicas began: their text is delivered."""
    n_failovers: int = 0
    """The number of replicas that began the request and could not end it."""
    failovers_s: tuple[float, ...] = ()
    """The seconds that the request spent with each of these replicas, as far as they are known."""
    n_discard: int = 0
    """Tokens that a context shift drops; 0: half of what it may."""
    n_cache_reuse: int = 0
    """Chunks of so many tokens or more are taken from a slot, too, that stand there behind tokens which the
    prompt does not have. They are moved up, and not quite what would be computed. 0: none."""
    slot_id: int = -1
    """The slot that it gets if that is idle; -1: the best one."""
    return_progress: bool = False
    """Whether its stream tells how far its prompt is computed."""
    cache_group: str = ""
    """The requests that share prefixes in the KV cache: nothing else is a start for them. Empty for all
    that come without API keys and without a `cache_salt`."""
    background: bool = False
    """Whether nobody waits for it: it gets what others leave within their shares, at any `priority`."""
    told_together: bool = False
    """Whether nobody reads along: but for its first one, its tokens may come several at a time."""
    adapters: Adapters = ()
    """The request's LoRA adapters. KV computed with them is of no use with others."""
    media: tuple[Medium, ...] = ()
    deadline: Deadline = NO_DEADLINE
    """The engine refuses the request at once if it forecasts to miss the deadline. A request in the
    background leaves the background if that is how it meets the deadline."""
    n_preparing: int = 0
    """The requests that its ingress was about to send when it sent this one."""

    @property
    def account(self) -> str:
        """The account that its costs are charged to: a client's background requests have their own."""
        return account(self.client, background=self.background)

    @property
    def content_group(self) -> str:
        """The requests with which this one shares the KV cache: its cache group's, with its adapters."""
        if not self.adapters:
            return self.cache_group
        used = "".join(f"{_ADAPTED}{one.key}={one.scale!r}" for one in self.adapters)
        return self.cache_group + used

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """All tokens to be computed before its next one."""
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. `cached_tokens` are the prompt tokens that were found in the KV cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


GAP_BOUNDARIES_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""The ends of the buckets of gaps between tokens, each inclusive, as in Prometheus; longer are last."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The stages where one request's time went, in seconds; the first three are those of the engine
    that ended it."""

    queue_s: float
    """The time from submit to a slot."""
    prefill_s: float
    """The time from a slot to the first token."""
    decode_s: float
    """The time from the first token to the end."""
    stalled_s: float = 0.0
    """The part of `decode_s` in which others were computed, or nobody, but not this request."""
    preempted_s: float = 0.0
    """The part of `prefill_s` and `decode_s` without a slot. The cache was full, the client had more than
    its share, or this request stepped back for another one."""
    n_preemptions: int = 0
    mean_batch: float = 0.0
    """Sequences that were computed together with this one, itself among them, on average."""
    failovers_s: tuple[float, ...] = ()
    """The times before all that, with each replica that began the request and could not end it."""
    n_failovers: int = 0
    n_resumed: int = 0
    """The generated tokens that are from these replicas."""
    gaps: tuple[tuple[int, float], ...] = ()
    """The gaps between two tokens: their number and seconds for each bucket of GAP_BOUNDARIES_S."""
    compute_s: float = 0.0
    """The decoder's seconds that were charged to the request: its share of each batch, and its samplers."""
    joules: float | None = None
    """The energy of these seconds; None where it is not measured."""

    @property
    def failed_over_s(self) -> float:
        return sum(self.failovers_s)

    @property
    def first_token_s(self) -> float:
        """The time from the first submit to the first token, with replicas before."""
        return self.failed_over_s + self.queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The one terminal event of a request."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str | None = None
    error: CorralError | None = None
    """Set exactly when `reason` is ERROR."""
    slot_id: int = -1
    """The slot that it had last; -1 if it has none."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """An engine's record of a request."""

    id: str
    http_id: str
    client: str
    state: str
    """"waiting", "prefill", "decode" or "ended"."""
    end: SequenceEnd | None = None
    """Set exactly when it has ended."""
    replica_id: str = ""
    node_id: str = ""

    def belongs_to(self, any_id: str) -> bool:
        """Whether the request has that id, is part of the answer with that id, or of that HTTP request."""
        base = self.id.partition("~")[0]  # without the number of a replica that went on with it
        return any_id != "" and any_id in (self.id, base, base.rpartition(".")[0], self.http_id)


@dataclass(frozen=True, slots=True)
class FetchingReplica:
    """An engine replica that does not answer yet, as it fetches, converts or loads its model."""

    replica_id: str
    node_id: str
    stage: str
    done: float
    limit_s: float | None = None
    """The most seconds that the stage takes; None: no limit."""


@dataclass(frozen=True, slots=True)
class Asleep:
    """An engine replica whose model is not loaded."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class ReplicaRecords:
    """An engine replica's records of a request."""

    replica_id: str
    records: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, by the model's own logits: before penalties, temperature and the rest."""

    logprob: float
    """The natural logarithm of the token's probability."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens in its place, the likeliest first, with their logarithms."""


class Sampled(NamedTuple):
    """A sampled token."""

    token: int
    logprobs: TokenLogprobs | None = None
    complete: bool = False
    """Whether its grammar allows nothing after it."""


class Accepted(NamedTuple):
    """An engine has taken the request, and has computed nothing yet: what a request's stream begins with,
    unless it is refused. Deltas follow."""

    first_token_s: float | None = None
    """The forecast of the seconds to the first token, and to the end; None if nothing was measured."""
    end_s: float | None = None
    background: bool = False
    """Whether all others go first."""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far a prompt is computed."""

    n_total: int
    n_cached: int
    n_processed: int
    """Tokens that are in the cache now, those among them."""
    seconds: float
    """The seconds since the request got its slot."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New text of a request. A delta may hold several tokens, or none (text held back, or the end)."""

    text: str
    token_ids: tuple[int, ...]
    end: SequenceEnd | None = None
    """Set on the last delta only."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """The log probabilities of each of the prompt's tokens but for the first, if the request wants them.
    They come with the first generated token, or with the end if there is none."""
    progress: tuple[PromptProgress, ...] = ()
    """How far the prompt was, from time to time, if the request wants to know: before its first token."""

    @property
    def without_end(self) -> TokenDelta:
        return self if self.end is None else replace(self, end=None)

    @property
    def only_end(self) -> TokenDelta:
        return TokenDelta("", (), self.end)

    def then(self, later: TokenDelta) -> TokenDelta:
        return TokenDelta.join((self, later))

    @classmethod
    def join(cls, deltas: Sequence[TokenDelta]) -> TokenDelta:
        """Deltas of a request in their order as one, with the end of the last."""
        return cls(
            "".join(delta.text for delta in deltas),
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            deltas[-1].end if deltas else None,
            tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
            tuple(chain.from_iterable(delta.prompt_logprobs for delta in deltas)),
            tuple(chain.from_iterable(delta.progress for delta in deltas)),
        )


@dataclass(frozen=True, slots=True)
class SlotAction:
    """The result of a requested action on one slot."""

    slot_id: int
    n_tokens: int
    n_bytes: int
    """The size of the file, if there was one."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """An engine replica's state and statistics."""

    replica_id: str
    node_id: str
    engine: dict[str, Any]
    """The fields of `serve_app.engine.EngineStats`."""
    cores: tuple[int, ...] | None = None
    """The CPUs that are its own, by the kernel's numbers; None if it is not pinned to any."""
    numa_node: int | None = None
    """The NUMA node that has all of them, if one has."""
    latencies: dict[str, dict[float, int]] = field(default_factory=dict)
    """The latencies of the last five minutes. They are how many first tokens (`ttft_s`) and gaps (`itl_s`)
    took more than the bound before, and up to so many seconds. Bounds are 10% apart."""
    placement: str = ""
    """Why it is there, why there are so many replicas, and the memory that these divide."""
    stage: dict[str, Any] | None = None
    """The fields of `serve_app.plugins.stages.chain.StageCounts`, if the model is computed in stages."""
