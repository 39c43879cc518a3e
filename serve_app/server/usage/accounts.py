"""The account of an API key: what runs for it, and what is left of its budgets."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from functools import partial

from serve_app.base.errors import KeyLimitError, LedgerError, NoRoomError, RateLimitError
from serve_app.config.keys import ApiKey
from serve_app.server.http.request_context import RETRY_S, Clock
from serve_app.server.usage import budgets
from serve_app.server.usage.budgets import DAY, MINUTE, MONTH, Claim, Period, Refusal
from serve_app.server.usage.ledger import Ledger

logger = logging.getLogger("corral.ingress")

FORGIVEN_S = 5
"""A key's debt is forgotten after so many further seconds without a request."""
_FIRST_ANSWER = 32
"""The tokens that a key's first answer is taken to have, if its request has no `max_tokens`."""
_NEWEST = 0.1
"""The weight of the newest answer in the mean of a key's answers."""
_AGAIN_S = 0.05
"""A request that ended at another ingress is known here after so long."""
_PATIENCE_S = 2.0
"""The longest that a request waits for the ledger's file."""
_FAILED_S = 5
"""The seconds after which a client tries again whose budgets cannot be read."""


class Reservation:
    """Tokens that a request has taken from budgets, in the slots of its beginning."""

    def __init__(
        self, account: KeyAccount, periods: Sequence[Period], n_prompt: int, n_answers: int, n: int
    ) -> None:
        """The answers have `n` tokens together."""
        self._account = account
        self._slots = [(period, period.slot(account.ledger.clock())) for period in periods]
        self._n_prompt, self._n_left = n_prompt, n
        self._n_answers, self._n_generated = n_answers, 0

    def charge(self, n_tokens: int) -> None:
        """Note so many tokens of answers. They count from now on, in the place of reserved ones. Those
        beyond the reserved ones are charged besides."""
        self._n_generated += n_tokens
        n_reserved = min(n_tokens, self._n_left)
        self._n_left -= n_reserved
        now = self._account.ledger.clock()
        self._spend(n_tokens, [(period, period.slot(now)) for period, _ in self._slots])
        self._spend(-n_reserved, self._slots)

    def give_back(self) -> None:
        """Give the prompts back, too: nothing was computed."""
        self._spend(-self._n_prompt - self._n_left, self._slots)
        self._n_prompt = self._n_left = 0

    def settle(self) -> None:
        """Give back what answers did not need. Idempotent."""
        if self._n_generated:
            self._account.learn_length(self._n_generated / self._n_answers)
        self._spend(-self._n_left, self._slots)
        self._n_left = self._n_generated = 0

    def _spend(self, n_tokens: int, slots: Sequence[tuple[Period, int]]) -> None:
        if n_tokens:
            for period, slot in slots:
                self._account.ledger.spend(self._account.key.name, period, slot, n_tokens)


class KeyAccount:
    """The present use of a key. Only in the ingress's event loop.

    Budgets and running requests are those of all ingresses, in the ledger. While its file cannot be used,
    the ingress goes on with what was left of the budgets.
    """

    def __init__(self, key: ApiKey, ledger: Ledger, clock: Clock = time.monotonic) -> None:
        self.key, self.ledger = key, ledger
        self._clock = clock
        self._n_running = 0
        self._refused_until = -math.inf
        self._mean_answer: float | None = None
        self._left: dict[str, float] = {}
        """The rest of each budget when the ledger was last asked."""

    def on_refusal(self) -> None:
        """Note that there was no room for one of its requests. They are refused at the door until one has
        been answered, or none has come for some seconds. One passes in the shortest time that anybody is
        told to wait. Each would cost more than to answer those who wait."""
        self._refused_until = self._clock() + RETRY_S

    def on_success(self) -> None:
        self._refused_until = -math.inf

    async def enter(self, n: int = 1, *, besides: int = 0) -> None:
        """Count `n` more requests for one. Raises KeyLimitError, RateLimitError or NoRoomError."""
        if not besides:
            self._check_door()
        most = self.key.max_concurrent_requests
        if most is not None and n + besides > most:
            raise KeyLimitError(
                f"The request asks for {n + besides} answers. This API key allows {most}."
            )
        if most is not None and self._n_running + n > most:
            raise _too_many(most, self._n_running)
        self._n_running += n
        if most is None or self.ledger.folder is None:
            return
        try:
            try:
                await self._check_others(most)
            except RateLimitError:
                await asyncio.sleep(_AGAIN_S)
                await self._check_others(most)
        except BaseException:
            self.leave(n)
            raise

    async def _check_others(self, most: int) -> None:
        """Raises RateLimitError if too many run, those at other ingresses among them."""
        name, n_own, ledger = self.key.name, self._n_running, self.ledger
        ledger.runs(name, n_own)
        now = ledger.clock()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                n_others = await ledger.call(
                    lambda db: budgets.others_running(db, name, ledger.holder, now)
                )
        except (LedgerError, TimeoutError):
            return
        if n_others + n_own > most:
            raise _too_many(most, n_others + n_own - 1)

    def leave(self, n: int = 1) -> None:
        self._n_running -= n
        if self.key.max_concurrent_requests is not None and self.ledger.folder is not None:
            self.ledger.runs(self.key.name, self._n_running)

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

    async def reserve(
        self, n_prompt: int, n_answers: int, most_each: int | None, *, background: bool
    ) -> Reservation:
        """Take the prompts' tokens from the budgets, and as many as the answers will probably have, which
        may have `most_each` if that is set. In the background, only budgets of a day and more count. Raises
        RateLimitError."""
        n = n_answers * self._likely_answer(most_each)
        claims = self._claims(n_prompt + n, background=background)
        if claims:
            await self._reserve(claims)
        periods = [claim.period for claim in claims if claim.amount]
        return Reservation(self, periods, n_prompt, n_answers, n)

    def _likely_answer(self, most: int | None) -> int:
        if self._mean_answer is not None:
            return math.ceil(min(self._mean_answer, math.inf if most is None else most))
        return _FIRST_ANSWER if most is None else most

    async def _reserve(self, claims: Sequence[Claim]) -> None:
        name, now = self.key.name, self.ledger.clock()
        function = partial(budgets.reserve, key=name, claims=claims, now=now)
        call = asyncio.ensure_future(self.ledger.call(function))
        try:
            await asyncio.wait([call], timeout=_PATIENCE_S)
        except asyncio.CancelledError:
            call.add_done_callback(partial(self._return, claims, now))
            raise
        if not call.done() or call.exception():
            call.add_done_callback(partial(self._return, claims, now))
            self._reserve_of_share(claims, now)
            return
        left = call.result()
        if isinstance(left, Refusal):
            limit = f"{left.claim.limit:g} {left.claim.period.name}"
            raise RateLimitError(f"This API key has used up its {limit}.", left.wait_s)
        self._left = left

    def _return(
        self, claims: Sequence[Claim], now: float, call: asyncio.Task[Refusal | dict[str, float]]
    ) -> None:
        """Give back what a call has taken that nobody waited for."""
        if not call.cancelled() and not call.exception() and isinstance(call.result(), dict):
            for claim in claims:
                slot = claim.period.slot(now)
                self.ledger.spend(self.key.name, claim.period, slot, -claim.amount)

    def _reserve_of_share(self, claims: Sequence[Claim], now: float) -> None:
        for claim in claims:
            if self._left.get(claim.period.name, 0.0) <= claim.amount:
                raise RateLimitError("The budgets of API keys cannot be read now.", _FAILED_S)
        for claim in claims:
            self._left[claim.period.name] -= claim.amount
            slot = claim.period.slot(now)
            self.ledger.spend(self.key.name, claim.period, slot, claim.amount)

    def _claims(self, n_tokens: int, *, background: bool) -> list[Claim]:
        key, claims = self.key, []
        if key.tokens_per_minute is not None and not background:
            claims.append(Claim(MINUTE, key.tokens_per_minute, n_tokens))
        if key.tokens_per_day is not None:
            claims.append(Claim(DAY, key.tokens_per_day, n_tokens))
        if key.cost_per_month is not None:
            claims.append(Claim(MONTH, key.cost_per_month, 0.0))
        return claims

    def charge_prompts(self, n_prompt: int) -> Reservation:
        """Charge the prompts to the budgets of a day and more, whatever is left of them."""
        periods = [] if self.key.tokens_per_day is None else [DAY]
        now = self.ledger.clock()
        for period in periods:
            self.ledger.spend(self.key.name, period, period.slot(now), n_prompt)
        return Reservation(self, periods, n_prompt, 1, 0)

    def learn_length(self, n_tokens: float) -> None:
        """Learn from the length of an answer."""
        if self._mean_answer is None:
            self._mean_answer = n_tokens
        self._mean_answer += _NEWEST * (n_tokens - self._mean_answer)

    def charge_cost(self, cost: float) -> None:
        if self.key.cost_per_month is not None and cost:
            slot = MONTH.slot(self.ledger.clock())
            self.ledger.spend(self.key.name, MONTH, slot, cost)


def _too_many(most: int, n_running: int) -> RateLimitError:
    return RateLimitError(
        f"This API key allows {most} requests at once, and {n_running} are running.", 1
    )
