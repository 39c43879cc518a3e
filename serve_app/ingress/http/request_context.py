"""Who sent the request that the current task answers."""

from __future__ import annotations

import hashlib
import json
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

    def cache_group(self, salt: str | None) -> str:
        """Among whom cached prefixes are shared: keys of one group, or, without keys, all; of them, those
        who send the same `cache_salt`. Does not show what it is made of."""
        key = None if self.account is None else self.account.key
        parts = [None if key is None else key.cache_group or key.name, salt]
        if parts == [None, None]:
            return ""
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

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
