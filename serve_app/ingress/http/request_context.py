"""The caller of the request that the current task answers, and what the caller is charged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus

from serve_app.errors import PermissionDeniedError
from serve_app.ingress.http.account import Account
from serve_app.types import account

# Statuses of answers that say: nothing was done for this request.
_REFUSALS = frozenset({400, 429, 503})


@dataclass(slots=True)
class Caller:
    """The sender of one HTTP request. Used in one task at a time."""

    request_id: str = ""
    """The request's `x-request-id`: its sender's, or Serve's."""
    account: Account | None = None
    """The account of the API key, if there are keys."""
    address: str = ""
    """The sender's IPv4 address, or network of IPv6 addresses."""
    is_operator: bool = True
    """Whether it may do what operators do, and see what others do."""
    is_batch_line: bool = False
    """Whether this is a line of a batch."""
    is_promoted: bool = False
    """Whether the line's time runs out: it takes part with all requests, as one more client, and is charged
    and limited as they are."""
    ignored: list[str] = field(default_factory=list)
    """Fields of its body that Corral does not have: see request_model."""
    _n_reserved: int = field(default=0, init=False)
    _n_running: int = field(default=0, init=False)
    _is_running: bool = field(default=False, init=False)
    """Whether it has asked for work."""

    def client(self, user: str | None) -> str:
        """Among whom slots are shared: API keys, or, without, users; and batches whose time runs out."""
        name = (user or "") if self.account is None else self.account.key.name
        return account(name, background=self.is_promoted)

    @property
    def is_background(self) -> bool:
        """Whether all others go first. Such a line is not held against the key's other requests."""
        return self.is_batch_line and not self.is_promoted

    def cache_group(self, salt: str | None) -> str:
        """Among whom cached prefixes are shared: keys of one group, or, without keys, all; of them, those
        who send the same `cache_salt`. Does not show what it is made of."""
        key = None if self.account is None else self.account.key
        parts = [None if key is None else key.cache_group or key.name, salt]
        if parts == [None, None]:
            return ""
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @property
    def holder(self) -> str:
        """The client that scarce things of the ingress are counted for: API keys, or, without,
        addresses."""
        name = self.address if self.account is None else self.account.key.name
        return account(name, background=self.is_batch_line)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While a request asks for work. Raises RateLimitError if the key has too many."""
        self._run(1)
        try:
            yield
        finally:
            if self.account is not None:
                self.account.leave(self._n_running)

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """Within this, the caller's work counts as running until the block ends, not the HTTP request."""
        n, self._n_running = self._n_running, 0
        try:
            yield
        finally:
            if self.account is not None:
                self.account.leave(n)

    def ask_for(self, n_answers: int) -> None:
        """The request that runs is for so many answers, each of which counts as one. Raises KeyLimitError
        or RateLimitError if the key may not have as many."""
        self._run(n_answers - self._n_running)

    def _run(self, n: int) -> None:
        if self.account is not None and n > 0 and not self.is_background:
            self.account.enter(n, besides=self._n_running)
            self._n_running += n
            self._is_running = True

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        """Charge these prompts, cached tokens too, unless the answer is a refusal. Raises KeyLimitError or
        RateLimitError."""
        if self.account is None:
            return
        n_prompt = sum(map(len, prompts))
        if self.is_background:
            self.account.check_prompt(n_prompt)
        else:
            self.account.admit(n_prompt)
            self._n_reserved += n_prompt

    def charge(self, n_tokens: int) -> None:
        """Charge an answer's tokens."""
        if self.account is not None and not self.is_background:
            self.account.charge(n_tokens)

    def computed(self) -> None:
        """Note that the prompts were used: they stay charged, whatever becomes of the answer."""
        self._n_reserved = 0

    def answered(self, status: int) -> None:
        """The answer begins. If it says that the request was refused, its prompts are not charged."""
        if self.account is None:
            return
        if status in _REFUSALS:
            self.account.refund(self._n_reserved)
            self._n_reserved = 0
        elif self._is_running and status < HTTPStatus.BAD_REQUEST:
            self.account.served()

    def refused(self) -> None:
        """There was no room for the request."""
        if self.account is not None and not self.is_background:
            self.account.refused()

    def check_operator(self, what: str) -> None:
        """Raises PermissionDeniedError unless this is an operator. `what` begins the message."""
        if self.is_operator:
            return
        who = (
            "ingress.anonymous_admin: true, or API keys with admin: true"
            if self.account is None
            else "an API key whose entry has admin: true"
        )
        raise PermissionDeniedError(f"{what} is only for operators. It needs {who}.")

    def check_priority(self, priority: int) -> None:
        """Raises PermissionDeniedError for one that goes before what the caller may send."""
        if self.account is not None:
            least = self.account.key.min_priority
        else:
            least = priority if self.is_operator else 0
        if priority < least:
            raise PermissionDeniedError(
                f"priority: {priority} is too low. You may send {least} or more.",
                "priority",
            )


_current: ContextVar[Caller] = ContextVar("caller")


def current() -> Caller:
    """The sender of the request that this task answers."""
    return _current.get(None) or Caller()


def enter(caller: Caller) -> None:
    """Have this task answer that caller from here on."""
    _current.set(caller)
