"""Grammars that begin when a trigger appears: until then, the text is free.

Source: llama.cpp, `llama_sampler_init_grammar_lazy_patterns` and `common/sampling.cpp`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from serve_app.llama.grammars.constraint import Constraint
from serve_app.llama.grammars.patterns import Search, compiled
from serve_app.sampling import Triggers


class LazyConstraint(Constraint):
    """A place before a grammar. Where the text has a trigger, the grammar begins with that: a token, or
    the match of a pattern, or of the first of its groups that has any text."""

    def __init__(
        self,
        held: Constraint,
        triggers: Triggers,
        piece: Callable[[int], bytes],
        tokenize: Callable[[str], Sequence[int]],
    ) -> None:
        """`piece` gives a token's bytes, control tokens' names, too; `tokenize` a text's tokens. Raises
        ValueError if the patterns are not valid, or too long."""
        self._held = held
        self._piece, self._tokenize = piece, tokenize
        self._tokens = frozenset(triggers.tokens)
        self._searches = [Search(pattern) for pattern in compiled(triggers.patterns)]
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
        begun = self._begun(token)
        if begun is None:
            return True
        self._is_free, self._text = False, ""
        if not all(self._held.take(one) for one in self._tokenize(begun)):
            self._fault = f"it does not begin with its trigger, {begun!r}"
        return self._fault is None

    def _begun(self, token: int) -> str | None:
        """The grammar's text so far, once it has begun."""
        piece = self._piece(token)
        if token in self._tokens:
            return piece.decode(errors="replace")
        text = self._utf8.decode(piece)
        self._text += text
        found = [search.feed(text) for search in self._searches]
        place = next((one for one in found if one is not None), None)
        return None if place is None else self._text[place:]

    def allowed(self) -> NDArray[np.bool_]:
        """For each token id, whether it may be next: all may before the grammar begins."""
        return ~np.zeros(self._held.n_vocab, np.bool_) if self._is_free else self._held.allowed()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow: the grammar has begun, and is complete."""
        return not self._is_free and self._held.complete

    @property
    def fault(self) -> str | None:
        """Why the grammar gave up, or could not begin with its trigger, if so."""
        return self._fault or self._held.fault
