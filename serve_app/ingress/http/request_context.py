"""Who sent the request that the current task answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from serve_app.ingress.http.api_keys import Account


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of one HTTP request."""

    request_id: str = ""
    """The request's `x-request-id`: its sender's, or Serve's."""
    account: Account | None = None
    """If there are API keys."""

    def client(self, user: str | None) -> str:
        """Among whom slots are shared: API keys, or, without, users."""
        return (user or "") if self.account is None else self.account.key.name

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        """Charge these prompts. Raises KeyLimitError or RateLimitError."""
        if self.account is not None:
            self.account.admit(sum(map(len, prompts)))

    def charge(self, n_tokens: int) -> None:
        """Charge an answer's tokens."""
        if self.account is not None:
            self.account.charge(n_tokens)


_NOBODY = Caller()
_current: ContextVar[Caller] = ContextVar("caller", default=_NOBODY)


def current() -> Caller:
    """The sender of the request that this task answers."""
    return _current.get()


def enter(caller: Caller) -> None:
    """From here on, this task answers that caller."""
    _current.set(caller)
