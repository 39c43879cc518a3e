"""The engine's mutable state of one request."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from serve_app.engine.backend import Sampler, Vocabulary
from serve_app.engine.text import TextAssembler
from serve_app.errors import CorralError
from serve_app.types import (
    FinishReason,
    GenerationRequest,
    SequenceEnd,
    Timings,
    TokenDelta,
    Usage,
)

Sink = Callable[[TokenDelta], None]
"""Takes a sequence's deltas, on the decoder thread; must neither block nor raise."""


NO_SLOT = -1
"""`Sequence.slot_id` before it is admitted."""


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Sequence:
    """One request's tokens, and how many of them are in the KV cache. Decoder thread only.

    `tokens` is the prompt and everything sampled since; `tokens[:n_past]` are in the cache. A step
    feeds some of `tokens[n_past:]` and nothing else, so a sequence cannot feed a token that is not
    its own, and samples when the last of them is fed.
    """

    def __init__(self, request: GenerationRequest, sink: Sink) -> None:
        self.request = request
        self.id = request.id
        self.sink = sink
        self.tokens = list(request.prompt)
        self.n_prompt = len(request.prompt)
        self.n_past = 0
        self.n_cached = 0
        self.slot_id = NO_SLOT
        self.state = SequenceState.WAITING
        self._sampler: Sampler | None = None
        self._text = TextAssembler(request.sampling.stop)
        self._submitted = time.monotonic()
        self._admitted: float | None = None
        self._first_token: float | None = None

    @property
    def n_pending(self) -> int:
        """Tokens that are not in the cache yet: 1 while decoding, the rest of the prompt before."""
        return len(self.tokens) - self.n_past

    @property
    def n_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def finished(self) -> bool:
        """Whether the terminal event was made."""
        return self.state is SequenceState.FINISHED

    @property
    def service_s(self) -> float:
        """Seconds since it got a slot; 0 if it never did."""
        return 0.0 if self._admitted is None else time.monotonic() - self._admitted

    def admit(self, slot_id: int, n_cached: int, sampler: Sampler) -> None:
        """Give it a slot whose cache already holds its first `n_cached` tokens."""
        self.slot_id, self._sampler = slot_id, sampler
        self.n_past = self.n_cached = n_cached
        self.state = SequenceState.PREFILL
        self._admitted = time.monotonic()

    def sample(self, row: int) -> int:
        """The next token, from that row of the batch just decoded. Only between admit and close."""
        if self._sampler is None:
            raise RuntimeError(f"Sequence {self.id} has no sampler.")
        return self._sampler.sample(row)

    def advance(self, n_rows: int) -> int:
        """Its next `n_rows` tokens are in the cache now; returns how many were the prompt's."""
        n_prompt_rows = max(0, min(self.n_prompt - self.n_past, n_rows))
        self.n_past += n_rows
        return n_prompt_rows

    def accept(self, token: int, vocabulary: Vocabulary, n_ctx_slot: int) -> TokenDelta:
        """Take a sampled token; the delta carries the end if this was the last one."""
        self.state = SequenceState.DECODE
        self._first_token = self._first_token or time.monotonic()
        self.tokens.append(token)
        if vocabulary.is_eog(token):
            return self.finish(FinishReason.STOP, "", (token,))
        text = self._text.push(vocabulary.piece(token))
        if self._text.stop is not None:
            return self.finish(FinishReason.STOP, text, (token,))
        max_tokens = self.request.sampling.max_tokens
        if self.n_generated == max_tokens or len(self.tokens) >= n_ctx_slot:
            return self.finish(FinishReason.LENGTH, text, (token,))
        return TokenDelta(text, (token,))

    def finish(
        self,
        reason: FinishReason,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        error: CorralError | None = None,
    ) -> TokenDelta:
        """The terminal event, with any text that was held back. Once only."""
        self.state = SequenceState.FINISHED
        if self._text.stop is None:
            text += self._text.flush()
        return TokenDelta(text, token_ids, self._end(reason, error))

    def close(self) -> None:
        """Free the sampler."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def _end(self, reason: FinishReason, error: CorralError | None) -> SequenceEnd:
        now = time.monotonic()
        admitted = self._admitted or now
        first_token = self._first_token or now
        return SequenceEnd(
            reason=reason,
            usage=Usage(self.n_prompt, self.n_generated, self.n_cached),
            timings=Timings(
                queue_s=admitted - self._submitted,
                prefill_s=first_token - admitted,
                decode_s=now - first_token,
            ),
            stop=self._text.stop,
            error=error,
        )
