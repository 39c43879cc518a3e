"""The engine's mutable state of one request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import CorralError
from serve_app.base.formats import Row
from serve_app.base.values.answers import (
    FinishReason,
    PromptProgress,
    Sampled,
    SequenceEnd,
    TokenDelta,
    TokenLogprobs,
    Usage,
)
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.backends.base import Backend, Sampler, Vocabulary
from serve_app.engine.cache.packing import (
    TOKEN_BYTES,
    TokenArray,
    n_matching,
    n_tokens,
    pack,
    token_array,
)
from serve_app.engine.core.text import Detokenizer, LineLimits
from serve_app.engine.metrics.trace import Trace
from serve_app.kernels.llama.grammars.constraint import Constraint

if TYPE_CHECKING:
    from serve_app.engine.cache.slots import PrefixPending
    from serve_app.engine.policy.forecast import Expected

Sink = Callable[[TokenDelta], None]
"""Takes a sequence's deltas, on the decoder thread; must neither block nor raise."""


NO_SLOT = -1
"""`Sequence.slot_id` before it is admitted."""


class PromptSpan(Protocol):
    """A part of a prompt that is computed from a guest's embeddings: a picture's tile, or a sound."""

    @property
    def start(self) -> int:
        """The index of its first token in the prompt."""

    @property
    def end(self) -> int:
        """The index of the token behind it."""

    @property
    def is_ready(self) -> bool:
        """Whether its embeddings are there."""

    @property
    def is_whole(self) -> bool:
        """Whether all of its rows must be computed in one batch."""

    def decode(self, backend: Backend, rows: SequenceOf[Row]) -> None:
        """Compute its rows, as `Backend.decode` does."""


class SequenceState(Enum):
    """The stage of a sequence's life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Sequence:
    """The tokens of a request, and how many of them are in the KV cache. Decoder thread only.

    `tokens` is the prompt and everything sampled since, less what context shifts dropped;
    `tokens[:n_past]` are in the cache. A step feeds some of `tokens[n_past:]`, and drafts of what may
    follow. So a sequence cannot feed a token that is not its own, and it samples when the last is fed.
    That array only grows: after a context shift, it is another one.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        constraint: Constraint | None = None,
        spans: tuple[PromptSpan, ...] = (),
    ) -> None:
        self.request = request
        self.spans = spans
        self._borders = tuple(index for span in spans for index in (span.start, span.end))
        self.constraint = constraint
        self.id = request.id
        self.sink = sink
        self.n_prompt = len(request.prompt)
        self._packed = self.packed_prompt = pack(request.prompt)
        """Some of its first tokens; and all of its prompt. Nobody need pack them while others wait."""
        self.tokens = token_array(self._packed)
        self.n_generated = 0
        """Tokens sampled so far, by other engines too."""
        self.n_past = 0
        self.n_cached = 0
        self.n_likely_cached = 0
        """First tokens that will probably be in the cache when it gets its first slot."""
        self.expected: Expected | None = None
        """The forecast that it was accepted with."""
        self.n_awaited = 0
        """First tokens that others start from as soon as they are in the cache."""
        self.stops: tuple[int, ...] = ()
        """Lengths of its prompt at which a checkpoint of its slot is to be made, in order."""
        self.n_keep: int | None = None
        """First tokens that context shifts keep; None if a full context ends it."""
        self.n_exact: int | None = None
        """The number of first tokens that others may start from after a context shift. They are in the
        cache as if they had been computed anew. None: all tokens are."""
        self.prefix_pending: PrefixPending | None = None
        """The prefix of another sequence that it waits for, though a slot was free."""
        self.slot_id = NO_SLOT
        self._slot_room = 0
        self.state = SequenceState.WAITING
        self.spent_s = 0.0
        """Seconds that the decoder worked for it, and those that it was to work in all."""
        self.expected_s = 0.0
        self.lost_slot = request.n_failovers > 0
        """Whether it had a slot, here or elsewhere, and lost it for no other client's sake."""
        self.is_behind = request.background
        """Whether all others go first, as `SlotPolicy` decides for requests in the background."""
        self.trace = Trace()
        self.history: object = None
        """The samplers that its own are copies of when the sequence is admitted: new ones take long."""
        self._sampler: Sampler | None = None
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._text = Detokenizer(request.sampling.stop)
        is_limited = request.sampling.n_indent > 0 or request.sampling.t_max_predict_ms > 0
        self._line_limits = LineLimits(request.sampling) if is_limited else None
        self._n_told = -1
        """The prompt's tokens that the last progress reported."""
        self.untold: TokenDelta | None = None
        """The newest tokens, which the reader was not told of yet."""

    @property
    def admitted_at(self) -> float:
        """The time of its first slot, on the clock of `Trace.submitted`; 0 before."""
        return self.trace.admitted or 0.0

    @property
    def n_pending(self) -> int:
        """Tokens that are not in the cache yet: 1 while decoding, the rest of the prompt before."""
        return len(self.tokens) - self.n_past

    def leave_background(self) -> None:
        """Take part with all others. Before it is accepted."""
        self.request = replace(self.request, background=False)
        self.is_behind = False

    @property
    def n_to_stop(self) -> int:
        """Pending tokens until others can start there, a checkpoint is due, or a span begins or ends."""
        stops = (stop - self.n_past for stop in (*self.stops, self.n_awaited, *self._borders))
        return min((n for n in stops if n > 0), default=self.n_pending)

    @property
    def span(self) -> PromptSpan | None:
        """The span that its next token is part of."""
        n_past = self.n_past
        return next((span for span in self.spans if span.start <= n_past < span.end), None)

    @property
    def is_blocked(self) -> bool:
        """Whether it gets on only when the embeddings of a span are there."""
        span = self.span
        return span is not None and not span.is_ready

    @property
    def within_span(self) -> bool:
        """Whether it has a part of a span in the cache, and not all of it."""
        return self.n_whole(self.n_past) < self.n_past

    def n_whole(self, n_tokens: int) -> int:
        """The number of its first `n_tokens` tokens that end with no part of a span."""
        within = (span.start for span in self.spans if span.start < n_tokens < span.end)
        return next(within, n_tokens)

    @property
    def unscored_positions(self) -> range:
        """Positions of the prompt whose logits are wanted, to tell how likely the next token there is."""
        wanted = self.request.sampling.prompt_logprobs
        return range(len(self._prompt_logprobs), self.n_prompt - 1) if wanted else range(0)

    @property
    def n_reusable(self) -> int:
        """The number of tokens up to the first that must be computed: what is cached has no logits."""
        unscored = self.unscored_positions
        return unscored.start + 1 if unscored else len(self.tokens)

    def packed_tokens(self, n_wanted: int) -> bytes:
        """The first `n_wanted` tokens, packed: see `serve_app.engine.cache.packing`."""
        n_known = n_tokens(self._packed)
        if n_known < n_wanted:
            self._packed += pack(self.tokens[n_known:])
        return self._packed[: n_wanted * TOKEN_BYTES]

    def n_shared_with(self, prompt: bytes, n_most: int) -> int:
        """How many of its tokens, from the first one on, are those of a packed prompt, `n_most` at most.
        What it has generated is packed only if the prompt has all that is before: a step costs nothing."""
        n = n_matching(self._packed, prompt, 0, n_most * TOKEN_BYTES)
        if n == n_tokens(self._packed) < n_most:
            generated = pack(self.tokens[n:n_most])
            n += n_matching(generated, prompt, n * TOKEN_BYTES, n_most * TOKEN_BYTES)
        return n

    @property
    def n_left(self) -> int | None:
        """Tokens that it may still generate by its `max_tokens`; None if that is not set."""
        most = self.request.sampling.max_tokens
        return None if most is None else most - self.n_generated

    @property
    def is_finished(self) -> bool:
        """Whether the terminal event was made."""
        return self.state is SequenceState.FINISHED

    @property
    def sampler(self) -> Sampler:
        """The sampler that picks its tokens. Only between the first admit and close."""
        if self._sampler is None:
            raise RuntimeError(f"Sequence {self.id} has no sampler.")
        return self._sampler

    @property
    def n_computed(self) -> int:
        """Tokens that it came with and that were not in the cache. Since it got its slot."""
        return max(0, len(self.request.all_tokens) - self.n_cached)

    def resume(self, vocabulary: Vocabulary, options: EngineOptions) -> None:
        """Be where another engine left it: with the tokens that it generated, and their text delivered. Its
        context shifts dropped the same tokens. Before it is submitted."""
        n_ctx_slot, n_keep = options.n_ctx_slot, n_keep_on_shift(self.request, options)
        self.n_keep = n_keep
        for token in self.request.generated:
            self.tokens.append(token)
            self.n_generated += 1
            self._take(token, vocabulary)
            if self.constraint is not None:
                self.constraint.take(token)
            if n_keep is not None and len(self.tokens) == n_ctx_slot:
                self._drop(n_keep, dropped_by_shift(self.request, n_ctx_slot, n_keep))
        self.packed_tokens(len(self.tokens))

    def admit(
        self, slot_id: int, n_cached: int, sampler: Sampler | None, room: int = sys.maxsize
    ) -> None:
        """Give it a slot with `room` for so many tokens, whose cache already holds its first `n_cached`
        tokens. It gets its sampler the first time, and keeps it when it is preempted."""
        if sampler is not None:
            self._sampler, self.n_cached, self.history = sampler, n_cached, None
        self.trace.admit()
        self.slot_id, self.n_past, self._slot_room = slot_id, n_cached, room
        self.state = SequenceState.PREFILL

    def preempt(self) -> None:
        """Take its slot away: it waits for another one."""
        self.trace.preempt()
        self.slot_id, self.n_past, self.n_exact, self.stops = NO_SLOT, 0, None, ()
        self.state = SequenceState.WAITING

    @property
    def draft_room(self) -> int:
        """Tokens that a draft for it may have at most."""
        room = self._slot_room - len(self.tokens) - 1
        return room if self.n_left is None else min(room, self.n_left - 1)

    def give_up(self, n_tokens: int) -> TokenArray:
        """Hand over the first tokens, for its slot to keep: it has ended, and has none any more."""
        tokens, self.tokens, self._packed = self.tokens, token_array(), b""
        del tokens[n_tokens:]
        return tokens

    def advance(self, n_rows: int) -> None:
        """Count the next `n_rows` tokens as cached."""
        self.n_past += n_rows

    def progress(self) -> TokenDelta | None:
        """How far its prompt is, if its request wants to know and that has changed."""
        n_done = min(self.n_past, self.n_prompt)
        if not self.request.return_progress or n_done <= self._n_told:
            return None
        self._n_told = n_done
        n_cached = min(self.n_cached, self.n_prompt)
        done = PromptProgress(
            self.n_prompt, n_cached, n_done, self.trace.prefill_s if n_done > n_cached else 0.0
        )
        return TokenDelta("", (), progress=(done,))

    def score(self, rows: range) -> None:
        """Score the prompt's next tokens by these rows of the last batch."""
        known = 1 + len(self._prompt_logprobs)
        tokens = self.tokens[known : known + len(rows)]
        self._prompt_logprobs += map(self.sampler.score, rows, tokens)

    def accept(
        self, sampled: Iterable[Sampled], vocabulary: Vocabulary, n_ctx_slot: int
    ) -> TokenDelta:
        """Take sampled tokens, up to the one that ends it, if one does: the delta carries the end then. A
        full context ends it unless that is to be shifted."""
        self.state = SequenceState.DECODE
        of_prompt = () if self.n_generated else tuple(self._prompt_logprobs)
        text, taken, reason = "", list[Sampled](), None
        for sample in sampled:
            taken.append(sample)
            self.tokens.append(sample.token)
            self.n_generated += 1
            reason, shown = self._take(sample.token, vocabulary)
            text += shown
            if reason is None and sample.complete:
                reason = FinishReason.STOP
            full = self.n_keep is None and len(self.tokens) >= n_ctx_slot
            if reason is None and (full or self.n_left == 0):
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        self.trace.tokens(len(taken))
        ids = tuple(sample.token for sample in taken)
        logprobs = tuple(sample.logprobs for sample in taken if sample.logprobs is not None)
        if reason is None:
            return TokenDelta(text, ids, None, logprobs, of_prompt)
        end = self.finish(reason, text)
        return replace(end, token_ids=ids, logprobs=logprobs, prompt_logprobs=of_prompt)

    def stop_at_prompt(self) -> TokenDelta:
        """The terminal event of one that was to generate nothing: its prompt is computed."""
        end = self.finish(FinishReason.LENGTH)
        return replace(end, prompt_logprobs=tuple(self._prompt_logprobs))

    def _take(self, token: int, vocabulary: Vocabulary) -> tuple[FinishReason | None, str]:
        if vocabulary.is_eog(token):
            return FinishReason.STOP, ""
        is_preserved = token in self.request.sampling.preserved_tokens
        text = self._text.push(vocabulary.piece(token, special=is_preserved))
        if self._line_limits is not None:
            cut = self._line_limits.cut(text, self.trace.decoding_s)
            if cut is not None:
                self._text.drop()
                return FinishReason.LENGTH, cut
        return (None if self._text.stop is None else FinishReason.STOP), text

    def shift(self, n_keep: int, n_discard: int, *, cached: bool) -> None:
        """Forget `n_discard` tokens after the first `n_keep`. Either the cache has forgotten them too, and
        moved up what is behind. Or it holds nothing, and all the rest is to be computed again."""
        self._drop(n_keep, n_discard)
        self.stops = ()
        self.n_past = self.n_past - n_discard if cached else 0
        if cached:
            self.n_exact = n_keep if self.n_exact is None else min(n_keep, self.n_exact)

    def _drop(self, n_keep: int, n_discard: int) -> None:
        self.tokens = self.tokens[:n_keep] + self.tokens[n_keep + n_discard :]
        self._packed = self._packed[: n_keep * TOKEN_BYTES]

    def finish(
        self, reason: FinishReason, text: str = "", error: CorralError | None = None
    ) -> TokenDelta:
        """The terminal event, with any text that was held back. Once only."""
        self.state = SequenceState.FINISHED
        if self._text.stop is None:
            text += self._text.flush()
        return TokenDelta(text, (), self._end(reason, error))

    def close(self) -> None:
        """Free the sampler."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def _end(self, reason: FinishReason, error: CorralError | None) -> SequenceEnd:
        return SequenceEnd(
            reason=reason,
            usage=Usage(self.n_prompt, self.n_generated, min(self.n_cached, self.n_prompt)),
            timings=replace(
                self.trace.end(self.spent_s),
                failovers_s=self.request.failovers_s,
                n_failovers=self.request.n_failovers,
                n_resumed=len(self.request.generated),
            ),
            stop=self._text.stop,
            error=error,
            slot_id=self.slot_id,
        )


# Contexts shorter than this end when they are full, whatever was asked for: there is nothing to drop.
_LEAST_CTX = 8


def n_keep_on_shift(request: GenerationRequest, options: EngineOptions) -> int | None:
    """First tokens that a context shift keeps; None if the request ends instead. A request goes on only up
    to its `max_tokens`, or it might never end."""
    asked = request.context_shift
    wanted = options.context_shift if asked is None else asked
    if not wanted or request.sampling.max_tokens is None or options.n_ctx_slot < _LEAST_CTX:
        return None
    if request.media:  # half of one is none
        return None
    n_keep = options.n_keep if request.n_keep is None else request.n_keep
    n_keep = len(request.prompt) if n_keep < 0 else n_keep
    return max(1, min(n_keep, options.n_ctx_slot - _LEAST_CTX // 2))


def dropped_by_shift(request: GenerationRequest, n_ctx_slot: int, n_keep: int) -> int:
    """Tokens behind the first `n_keep` that a context shift drops: as many as the request says, or half of
    them, the newest one not counted."""
    return min(request.n_discard, n_ctx_slot - n_keep - 1) or (n_ctx_slot - n_keep) // 2
