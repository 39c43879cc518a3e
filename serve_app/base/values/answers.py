"""The pieces of an answer of an engine, and its end. Plain, frozen, picklable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from serve_app.base.errors import CorralError


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
