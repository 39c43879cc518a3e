"""Grammar constraints: what a sequence's text must match, by llguidance over a model's tokens."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary, finalize

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from numpy.typing import NDArray

from serve_app import heap
from serve_app.errors import InvalidRequestError

LIMITS = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=50_000)
"""A quarter of llguidance's own: one token of an expression that blows up takes 0.15 s with these, and
streams wait for it."""
KEPT_BYTES = 2**14
"""Texts of the grammars that are kept compiled may have so many bytes together. Compiled, they take four
hundred times as much."""


class Constraint:
    """One sequence's place in a grammar. Decoder thread only.

    Source: llguidance's `LLMatcher`, an Earley parser over a trie of the vocabulary.
    """

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        """Raises InvalidRequestError if the grammar is none, or takes too much."""
        if matcher.is_error():
            raise InvalidRequestError(f"The grammar cannot be used: {matcher.get_error()}")
        self._matcher = matcher
        self.n_vocab = n_vocab
        self._origin: Constraint | None = None

    def fresh(self) -> Constraint:
        """A constraint by the same grammar from its beginning, for another sequence, while this one took
        nothing yet. This one lives as long."""
        made = Constraint(self._matcher.deep_copy(), self.n_vocab)
        made._origin = self
        return made

    def take(self, token: int) -> bool:
        """Go on by this token; False, and nothing happens, if the grammar does not allow it here."""
        return self._matcher.try_consume_tokens([token]) == 1

    def allowed(self) -> NDArray[np.bool_]:
        """For each token id, whether it may be next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self.n_vocab, bitorder="little").astype(bool)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the text is what the grammar wants, or the grammar gave up."""
        return self._matcher.is_stopped()

    @property
    def fault(self) -> str | None:
        """Why the grammar gave up, if it did."""
        return self._matcher.get_error() or None


class CompiledGrammars:
    """Grammars in use, for requests with many answers, and the last ones, up to so many bytes of their
    texts, as the next request may have the same. One thread at a time."""

    def __init__(
        self, compile_one: Callable[[str], Constraint], kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._compile = compile_one
        self._most_bytes = kept_bytes
        self._used = WeakValueDictionary[str, Constraint]()
        self._kept: dict[str, Constraint] = {}
        """Grammars by their texts; the grammar that was used last is last."""
        self._n_bytes = 0

    def __getitem__(self, grammar: str) -> Constraint:
        compiled = self._used.get(grammar)
        if compiled is None:
            compiled = self._used[grammar] = self._compile(grammar)
            if len(grammar) > self._most_bytes:
                finalize(compiled, heap.trim_soon)
        if len(grammar) <= self._most_bytes:
            self._keep(grammar, compiled)
        return compiled

    def _keep(self, grammar: str, compiled: Constraint) -> None:
        if self._kept.pop(grammar, None) is None:
            self._n_bytes += len(grammar)
        self._kept[grammar] = compiled
        while self._n_bytes > self._most_bytes:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._n_bytes -= len(oldest)
