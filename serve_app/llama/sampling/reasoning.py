"""Ends reasoning that takes longer than its budget.

Source: llama.cpp, common/reasoning-budget.cpp.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from serve_app.sampling import ReasoningBudget


class ReasoningLimit:
    """Where one text is in its reasoning. When the budget is used up and the last character is whole,
    tokens are given, and not picked, up to the end of the reasoning. Afterwards all is free. One thread at
    a time."""

    def __init__(
        self, budget: ReasoningBudget, tokens: Sequence[int], piece: Callable[[int], bytes]
    ) -> None:
        """`tokens` are the prompt, and the text so far."""
        self._budget = budget
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._n_left: int | None = budget.n_tokens if budget.is_open else None
        """Tokens of the budget; None before the reasoning."""
        self._forced: list[int] = []
        self._last: tuple[int, ...] = ()
        self._is_over = False
        for token in tokens[budget.n_prompt :]:
            self.accept(token)

    @property
    def next(self) -> int | None:
        """The token that must come; None if any may."""
        if self._is_over or self._n_left is None:
            return None
        if not self._forced:
            if self._n_left > 0 or self._utf8.getstate()[0]:
                return None
            self._forced = list(self._budget.forced)
        return self._forced[0]

    def accept(self, token: int) -> None:
        """The token is the next one of the text."""
        if self._is_over:
            return
        if token == self.next:
            self._forced.pop(0)
            self._is_over = not self._forced
            return
        budget = self._budget
        self._last = (*self._last, token)[-max(len(budget.opening), len(budget.closing)) :]
        if self._n_left is None:
            if self._ends_with(budget.opening):
                self._n_left, self._last = budget.n_tokens, ()
            return
        self._n_left -= 1
        self._utf8.decode(self._piece(token))
        self._is_over = self._ends_with(budget.closing)

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return self._last[-len(tokens) :] == tokens
