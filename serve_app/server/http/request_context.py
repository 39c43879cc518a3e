"""The caller of the request that the current task answers, and what the caller is charged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import TYPE_CHECKING, TypedDict

from serve_app.base.errors import KeyLimitError, PermissionDeniedError, RateLimitError
from serve_app.base.values.answers import Accepted
from serve_app.base.values.requests import NO_DEADLINE, Deadline, account

if TYPE_CHECKING:
    from serve_app.server.usage.accounts import KeyAccount, Reservation
    from serve_app.server.usage.telemetry import ObservedRequest

Clock = Callable[[], float]
RETRY_S = 1
"""The shortest time that a refused client is told to wait."""


class UsageCounts(TypedDict, total=False):
    """Counts of requests, which the ledger of usage keeps."""

    requests: int
    """Requests that an engine accepted. Each answer of `n` is one."""
    completed: int
    aborted: int
    """Requests whose clients left."""
    failed: int
    refused: int
    """Requests that no engine accepted, also because their clients left before."""
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
    joules: float
    """Energy of `compute_s`, where it is measured."""


# Statuses of answers that say: nothing was done for this request.
_REFUSALS = frozenset({400, 429, 503})


@dataclass(slots=True)
class Caller:
    """The sender of one HTTP request. Used in one task at a time."""

    request_id: str = ""
    """The request's `x-request-id`: its sender's, or Serve's."""
    account: KeyAccount | None = None
    address: str = ""
    """The sender's IPv4 address, or network of IPv6 addresses."""
    is_operator: bool = True
    """Whether it may do what operators do, and see what others do."""
    allowed_models: Sequence[str] | None = None
    """The patterns of the models that it may use, which are its key's if it has one. None is all."""
    is_batch_line: bool = False
    is_promoted: bool = False
    """Whether the line's time runs out: it is one more client, charged and limited as others are."""
    ignored: list[str] = field(default_factory=list)
    counter: Callable[[str, UsageCounts], float] | None = None
    """Counts what is used of a model, and returns the cost."""
    later: Callable[[Callable[[], None]], None] = lambda count: count()
    """Has a function called before counts are written: so a stream counts many tokens at once."""
    observer: ObservedRequest | None = None
    answer_by: Deadline = NO_DEADLINE
    """The deadline as moments of `time.monotonic`."""
    accepted: list[Accepted] = field(default_factory=list, init=False)
    """The acceptances of the request's answers, which have forecasts."""
    n_preparing: int = field(default=0, init=False)
    """The requests of all callers that were about to be ready when this one was."""
    cost: float = field(default=0.0, init=False)
    is_demoted: bool = field(default=False, init=False)
    """Whether the key's budgets are used up, and its requests go on in the background."""
    _reserved: Reservation | None = field(default=None, init=False)
    _n_running: int = field(default=0, init=False)
    _is_running: bool = field(default=False, init=False)
    """Whether it has asked for work."""
    _is_computed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.account is not None:
            self.allowed_models = self.account.key.models

    def client(self, user: str | None) -> str:
        """The client among those that share the slots: an API key, or, without keys, a user. Batches whose
        time runs out are, for each of these, one more client."""
        return account(self.key_name or user or "", background=self.is_promoted)

    @property
    def is_background(self) -> bool:
        """Whether all others go first. Such a line is not held against the key's other requests."""
        return self.is_demoted or (self.is_batch_line and not self.is_promoted)

    def cache_group(self, salt: str | None) -> str:
        """The group that shares cached prefixes: keys of one group, or, without keys, all; of them, those
        who send the same `cache_salt`. The name of the group does not show what it is made of."""
        key = None if self.account is None else self.account.key
        parts = [None if key is None else key.cache_group or key.name, salt]
        if parts == [None, None]:
            return ""
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @property
    def key_name(self) -> str:
        """The name of the API key; empty without keys."""
        return "" if self.account is None else self.account.key.name

    @property
    def holder(self) -> str:
        """The client that scarce things are counted for: an API key, or, without keys, an address."""
        return account(self.key_name or self.address, background=self.is_batch_line)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A block in which a request asks for work. Raises RateLimitError if the key has too many."""
        await self._run(1)
        try:
            yield
        finally:
            if self.account is not None and self._n_running:
                self.settle()
                self.account.leave(self._n_running)

    @contextmanager
    def handed_over(self) -> Iterator[None]:
        """A block in which the caller's work counts as running until the block ends, not the HTTP
        request."""
        n, self._n_running = self._n_running, 0
        try:
            yield
        finally:
            if self.account is not None and n:
                self.account.leave(n)

    async def ask_for(self, n_answers: int) -> None:
        """The request that runs is for so many answers, each of which counts as one. Raises KeyLimitError
        or RateLimitError if the key may not have as many."""
        await self._run(n_answers - self._n_running)

    async def _run(self, n: int) -> None:
        if self.account is not None and n > 0 and not self.is_background:
            await self.account.enter(n, besides=self._n_running)
            self._n_running += n
            self._is_running = True

    async def admit(
        self, prompts: Sequence[Sequence[int]], n_answers: int = 0, most_each: int | None = None
    ) -> None:
        """Charge these prompts, cached tokens too, unless the answer is a refusal; and reserve tokens for
        the answers: see `KeyAccount.reserve`. Raises KeyLimitError or RateLimitError."""
        if self.account is None:
            return
        n_prompt, key = sum(map(len, prompts)), self.account.key
        if key.max_prompt_tokens is not None and n_prompt > key.max_prompt_tokens:
            raise KeyLimitError(
                f"The request has {n_prompt} prompt tokens. This API key allows "
                f"{key.max_prompt_tokens}."
            )
        try:
            self._reserved = await self.account.reserve(
                n_prompt, n_answers, most_each, background=self.is_background
            )
        except RateLimitError:
            has_deadline = self.answer_by != NO_DEADLINE
            if key.over_budget == "refuse" or self.is_batch_line or has_deadline:
                raise
            self.is_demoted = True
            self._reserved = self.account.charge_prompts(n_prompt)

    def charge(self, n_tokens: int) -> None:
        if self._reserved is not None:
            self._reserved.charge(n_tokens)

    def count(self, model: str, counts: UsageCounts) -> None:
        """Count what is used of a model, and charge its cost."""
        if self.counter is not None:
            cost = self.counter(model, counts)
            self.cost += cost
            if self.account is not None:
                self.account.charge_cost(cost)

    def settle(self) -> None:
        """Note that nothing more comes of the request: what it reserved and did not use is free again."""
        if self._reserved is not None:
            self._reserved.settle()

    def on_start(self, status: int) -> None:
        """The answer begins. If it says that the request was refused, its prompts are not charged."""
        if self.account is None:
            return
        if status in _REFUSALS:
            self.give_back()
        elif self._is_running and status < HTTPStatus.BAD_REQUEST:
            self.account.on_success()

    def give_back(self) -> None:
        """Note that nothing was done for the request: its prompts are not charged."""
        if self._reserved is not None and not self._is_computed:
            self._reserved.give_back()

    def keep_charge(self) -> None:
        """Note that the prompts were used: they stay charged, whatever becomes of the answer."""
        self._is_computed = True

    def on_refusal(self) -> None:
        if self.account is not None and not self.is_background:
            self.account.on_refusal()

    def check_operator(self, what: str) -> None:
        """Refuse all but operators, with PermissionDeniedError. `what` begins the message."""
        if self.is_operator:
            return
        who = (
            "API keys, one of them with admin: true"
            if self.account is None
            else "an API key whose entry has admin: true"
        )
        raise PermissionDeniedError(f"{what} is only for operators. It needs {who}.")

    def may_use(self, model_id: str) -> bool:
        """Whether the key may use a model, or with an adapter, a `MODEL:ADAPTER`."""
        allowed = self.allowed_models
        return allowed is None or any(fnmatchcase(model_id, pattern) for pattern in allowed)

    def check_model(self, model_id: str, name: str | None = None) -> None:
        """Refuse a model that the key may not use, with PermissionDeniedError. The message has the name
        that the client sent, if it sent one, and tells nothing of the model."""
        if not self.may_use(model_id):
            which = "the default model" if name is None else repr(name)
            raise PermissionDeniedError(
                f"This API key may not use {which}. GET /v1/models lists what it may use.", "model"
            )

    def most_new(self, n_prompt: int, most: int | None) -> int | None:
        """The tokens that an answer may have behind such a prompt, if the request asks for `most`. Raises
        KeyLimitError if there is no room for any."""
        longest = None if self.account is None else self.account.key.max_context_tokens
        if longest is None:
            return most
        if n_prompt >= longest:
            raise KeyLimitError(
                f"The prompt has {n_prompt} tokens. This API key allows {longest}, with the answer."
            )
        return min(longest - n_prompt, longest if most is None else most)

    def check_priority(self, priority: int) -> None:
        """Refuse a priority before the caller's least, with PermissionDeniedError."""
        if self.account is not None:
            least = self.account.key.min_priority
        else:
            least = priority if self.is_operator else 0
        if priority < least:
            raise PermissionDeniedError(
                f"priority: {priority} is too low. You may send {least} or more.", "priority"
            )


_current: ContextVar[Caller] = ContextVar("caller")


def current() -> Caller:
    return _current.get(None) or Caller()


def enter(caller: Caller) -> None:
    _current.set(caller)
