"""The caller of the request that the current task answers, and what the caller is charged."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, TypedDict

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from serve_app.errors import KeyLimitError, NoRoomError, PermissionDeniedError, RateLimitError
from serve_app.types import account

Clock = Callable[[], float]
_Secret = Annotated[str, Field(min_length=16, pattern=r"^[!-~]+$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ApiKey(BaseModel):
    """An entry of the key file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1)]
    """The name of the key's owner. Slots are shared fairly among names."""
    key: Annotated[_Secret | None, Field(repr=False)] = None
    """The secret, of 16 characters at least: letters, digits and signs of ASCII. `corral hash-keys` stores
    `sha256` in its place."""
    sha256: Annotated[_Sha256 | None, Field(repr=False)] = None
    """The SHA-256 of the secret, in hexadecimal. Whoever reads the file cannot use the key."""
    max_concurrent_requests: PositiveInt | None = None
    """POSTs that may run at once. Each ingress replica counts for itself, and each answer of `n` is one."""
    tokens_per_minute: PositiveInt | None = None
    """Tokens of prompts and answers together, for each ingress replica."""
    max_prompt_tokens: PositiveInt | None = None
    """Tokens of all prompts of a request together."""
    cache_group: Annotated[str, Field(min_length=1)] | None = None
    """Keys of one group start from each other's cached prefixes. Default: the key's own name."""
    min_priority: int = 0
    """The lowest `priority` that its requests may have. Lower values go first."""
    admin: bool = False
    """Whether the key may do what operators do, and see what others do."""

    @model_validator(mode="after")
    def _has_one_secret(self) -> ApiKey:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("either `key` or `sha256` is needed")
        return self

    @property
    def digest(self) -> str:
        return self.sha256 or hashlib.sha256((self.key or "").encode()).hexdigest()


RETRY_S = 1
"""The shortest time that a refused client is told to wait."""
FORGIVEN_S = 5
"""A key's debt is forgotten after so many further seconds without a request."""


class Account:
    """The present use of a key. Only in the ingress's event loop, and for its replica only.

    The tokens of a minute are a bucket that fills all the time. Answers, whose length nobody knows
    before, may overdraw it; the next request waits until it is filled again.
    """

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._n_running = 0
        self._spent = 0.0
        self._filled = clock()
        self._refused_until = -math.inf

    def refused(self) -> None:
        """There was no room for one of its requests. Until one has been answered, or none has come for
        some seconds, they are refused at the door but for one in the shortest time that anybody is told to
        wait: each would cost more than to answer those who wait."""
        self._refused_until = self._clock() + RETRY_S

    def served(self) -> None:
        self._refused_until = -math.inf

    def enter(self, n: int = 1, *, besides: int = 0) -> None:
        if not besides:
            self._check_door()
        most = self.key.max_concurrent_requests
        if most is not None and n + besides > most:
            raise KeyLimitError(
                f"The request asks for {n + besides} answers. This API key allows {most}."
            )
        if most is not None and self._n_running + n > most:
            raise RateLimitError(
                f"This API key allows {most} requests at once, and {self._n_running} are running.",
                1,
            )
        self._n_running += n

    def _check_door(self) -> None:
        now = self._clock()
        if now < self._refused_until:
            raise NoRoomError(
                "A moment ago there was no room for more requests of this API key. Wait the seconds that "
                "`Retry-After` gives.",
                RETRY_S,
            )
        if now < self._refused_until + FORGIVEN_S:
            self._refused_until = now + RETRY_S

    def leave(self, n: int = 1) -> None:
        self._n_running -= n

    def check_prompt(self, n_prompt: int) -> None:
        """Raises KeyLimitError if a request's prompts are longer than this key's may be."""
        key = self.key
        if key.max_prompt_tokens is not None and n_prompt > key.max_prompt_tokens:
            raise KeyLimitError(
                f"The request has {n_prompt} prompt tokens. This API key allows "
                f"{key.max_prompt_tokens}."
            )

    def admit(self, n_prompt: int) -> None:
        """Charge a request's prompts. Raises KeyLimitError if they are longer than this key's may be,
        RateLimitError if there are not so many tokens left."""
        self.check_prompt(n_prompt)
        key = self.key
        if key.tokens_per_minute is not None:
            self._refill(key.tokens_per_minute)
            wanted = min(n_prompt, key.tokens_per_minute)
            missing = self._spent + wanted - key.tokens_per_minute
            if missing > 0:
                raise RateLimitError(
                    f"This API key has used up its {key.tokens_per_minute} tokens per minute.",
                    math.ceil(60 * missing / key.tokens_per_minute),
                )
        self.charge(n_prompt)

    def refund(self, n_tokens: int) -> None:
        if self.key.tokens_per_minute is not None:
            self._spent = max(0.0, self._spent - n_tokens)

    def charge(self, n_tokens: int) -> None:
        if self.key.tokens_per_minute is not None:
            self._spent += n_tokens

    def _refill(self, per_minute: int) -> None:
        now = self._clock()
        self._spent = max(0.0, self._spent - (now - self._filled) * per_minute / 60)
        self._filled = now


class UsageCounts(TypedDict, total=False):
    """Counts of requests, which the ledger of usage keeps."""

    requests: int
    """Requests that an engine accepted. Each answer of `n` is one."""
    completed: int
    aborted: int
    """Requests whose clients left."""
    failed: int
    refused: int
    """Requests that no engine accepted."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of these prompts that were in the KV cache."""
    completion_tokens: int
    compute_s: float
    """Seconds of the decoder that were charged to the requests."""
    queue_s: float
    first_token_s: float
    """Seconds from the submission to the first token."""
    cost: float


# Statuses of answers that say: nothing was done for this request.
_REFUSALS = frozenset({400, 429, 503})


@dataclass(slots=True)
class Caller:
    """The sender of one HTTP request. Used in one task at a time."""

    request_id: str = ""
    """The request's `x-request-id`: its sender's, or Serve's."""
    account: Account | None = None
    address: str = ""
    """The sender's IPv4 address, or network of IPv6 addresses."""
    is_operator: bool = True
    """Whether it may do what operators do, and see what others do."""
    is_batch_line: bool = False
    is_promoted: bool = False
    """Whether the line's time runs out: it takes part with all requests, as one more client, and is charged
    and limited as they are."""
    ignored: list[str] = field(default_factory=list)
    count: Callable[[str, UsageCounts], None] = lambda _, __: None
    """UsageCounts what is used of a model."""
    _n_reserved: int = field(default=0, init=False)
    _n_running: int = field(default=0, init=False)
    _is_running: bool = field(default=False, init=False)
    """Whether it has asked for work."""

    def client(self, user: str | None) -> str:
        """The client among those that share the slots: an API key, or, without keys, a user. Batches whose
        time runs out are, for each of these, one more client."""
        name = (user or "") if self.account is None else self.account.key.name
        return account(name, background=self.is_promoted)

    @property
    def is_background(self) -> bool:
        """Whether all others go first. Such a line is not held against the key's other requests."""
        return self.is_batch_line and not self.is_promoted

    def cache_group(self, salt: str | None) -> str:
        """The group that shares cached prefixes: keys of one group, or, without keys, all; of them, those
        who send the same `cache_salt`. The name of the group does not show what it is made of."""
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
    return _current.get(None) or Caller()


def enter(caller: Caller) -> None:
    _current.set(caller)
