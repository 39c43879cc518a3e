"""Grammar constraints: what a sequence's text must match, by llguidance over a model's tokens.

A lazy one begins when a trigger appears: until then, the text is free.

Source of triggers: llama.cpp, `llama_sampler_init_grammar_lazy_patterns` and `common/sampling.cpp`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from serve_app.base.errors import InvalidRequestError
from serve_app.base.sampling import Triggers

LIMITS = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=50_000)
"""A quarter of llguidance's own: a token of an expression that blows up then takes 0.15 s."""


class Constraint:
    """The place of a sequence in a grammar. Decoder thread only.

    Source: llguidance's `LLMatcher`, an Earley parser over a trie of the vocabulary.
    """

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        """Raises InvalidRequestError if the grammar is none, or takes too much."""
        if matcher.is_error():
            raise InvalidRequestError(f"The grammar cannot be used: {matcher.get_error()}")
        self._matcher = matcher
        self.n_vocab = n_vocab
        self._origin: Constraint | None = None
        self._forced: list[int] = []
        """The only tokens that may follow, the next one last. To find n of them takes n times as long."""

    def fresh(self) -> Constraint:
        """A constraint by the same grammar from its beginning, for another sequence, while this one took
        nothing yet. This one lives as long."""
        made = Constraint(self._matcher.deep_copy(), self.n_vocab)
        made._origin = self
        return made

    def take(self, token: int) -> bool:
        """Go on by this token; False, and nothing happens, if the grammar does not allow it here."""
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        if self._forced and self._forced.pop() != token:
            self._forced.clear()
        return True

    def token_mask(self) -> NDArray[np.bool_]:
        """A flag for each token id: whether it may be next."""
        if self._forced:
            mask = np.zeros(self.n_vocab, np.bool_)
            mask[self._forced[-1]] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self.n_vocab, bitorder="little").astype(bool)
        if np.count_nonzero(mask) == 1:
            self._forced = self._matcher.compute_ff_tokens()[::-1]
        return mask

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the text is what the grammar wants, or the grammar gave up."""
        return self._matcher.is_stopped()

    @property
    def fault(self) -> str | None:
        """The reason why the grammar gave up, if it did, without llguidance's state."""
        return self._matcher.get_error().partition("\n")[0] or None


class LazyConstraint(Constraint):
    """A place before a grammar, which begins with the first trigger in the text: a token, or a text."""

    def __init__(
        self,
        held: Constraint,
        triggers: Triggers,
        piece: Callable[[int], bytes],
        tokenize: Callable[[str], Sequence[int]],
    ) -> None:
        """`piece` gives a token's bytes, control tokens' names, too; `tokenize` a text's tokens."""
        self._held = held
        self._piece, self._tokenize = piece, tokenize
        self._triggers = triggers
        self._n_held = max(map(len, triggers.texts), default=1)
        """The last characters that a trigger may have begun with."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._is_free = True
        self._fault: str | None = None

    def take(self, token: int) -> bool:
        """Go on by this token; False if the grammar, once it has begun, does not allow it."""
        if self._fault is not None:
            return False
        if not self._is_free:
            return self._held.take(token)
        begun = self._grammar_text(token)
        if begun is None:
            return True
        self._is_free, self._text = False, ""
        if not all(self._held.take(one) for one in self._tokenize(begun)):
            self._fault = f"it does not begin with its trigger, {begun!r}"
        return self._fault is None

    def _grammar_text(self, token: int) -> str | None:
        """The grammar's text so far, once it has begun."""
        piece = self._piece(token)
        if token in self._triggers.tokens:
            return piece.decode(errors="replace")
        self._text += self._utf8.decode(piece)
        places = [self._text.find(text) for text in self._triggers.texts]
        if begun := [place for place in places if place >= 0]:
            return self._text[min(begun) :]
        self._text = self._text[-self._n_held :]
        return None

    def token_mask(self) -> NDArray[np.bool_]:
        """A flag for each token id: whether it may be next. All may before the grammar begins."""
        return ~np.zeros(self._held.n_vocab, np.bool_) if self._is_free else self._held.token_mask()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the grammar has begun, and is complete."""
        return not self._is_free and self._held.complete

    @property
    def fault(self) -> str | None:
        """The reason why the grammar gave up, or could not begin with its trigger, if so."""
        return self._fault or self._held.fault
