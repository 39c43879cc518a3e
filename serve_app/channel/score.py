"""Scores replicas by how soon they would answer a prompt. Pure: no Ray, no threads, no clock.

The expected time to the first token begins with the wait for a slot. Prompts before it and its own missing
part follow, at the speed that this replica measured. A prefix that a replica holds shortens it, work makes
it longer, and both weigh what they cost: there is no rule besides.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serve_app.channel.blocks import BLOCK_TOKENS, Chain, n_leading

_STRANGERS = 2
"""Replicas drawn by chance for each prompt: several routers that know the same must not all pick one."""
_HOLDERS = 4
"""Replicas with the longest prefix that are looked at besides."""
_OTHERS = 1.0
"""Weight of the time that a prompt takes from others, beside its own time to the first token."""
_ALONE = 2.0
"""The additional time of a token with a step of its own, as part of the time of one among others."""
_FORGET_S = 10.0
"""The seconds after which what was sent counts as in the report, or as lost."""
_UNMEASURED_S = 0.001
"""The time of a token where none was measured."""
_SILENT_S = 2.0
"""Additional time to the first token at a replica that has no channel: it may have to load its model."""

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report about itself. The defaults stand for a replica that has not said anything."""

    n_slots: int = 8
    n_live: int = 0
    """Requests that run or wait."""
    work_s: float = 0.0
    """Seconds until they would all have ended; of these, `prefill_s` for what is missing of prompts."""
    prefill_s: float = 0.0
    prompt_token_s: float = 0.0
    """Measured seconds of a prompt token, and of a generated one with all slots busy; 0 if unknown."""
    token_s: float = 0.0
    answer_tokens: float = 128.0
    blocks: frozenset[int] = frozenset()
    requests: frozenset[int] = frozenset()
    """Hashes of the requests that came last: which of them the figures include."""
    n_background: int = 0
    """Requests in the background, which are not in those figures, and the seconds that they would take."""
    background_s: float = 0.0
    turns: frozenset[int] = frozenset()
    """Hashes of the adapters that those which run or wait have: each has steps of its own."""
    first_end_s: float = 0.0
    """Seconds until the first of those that run has ended."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """The properties of a request that the decision uses."""

    key: int
    n_tokens: int = 1
    chain: Chain = ()
    max_tokens: float = float("inf")
    group: str = ""
    """The HTTP request, by whose id Serve says that one of its parts has ended."""
    shared: Chain = ()
    """The chain that it would have if all cache groups could start from it: system prompts are held so."""
    background: bool = False
    """Whether it waits for all others, who do not notice it."""
    turn: int = 0


@dataclass(slots=True)
class UnreportedRequest:
    prompt: RoutedPrompt
    at: float
    missing: int
    """Prompt tokens that it found to compute."""
    done: bool = False


@dataclass(frozen=True, slots=True)
class TTFTForecast:
    """The forecast for a prompt at a replica."""

    ttft_s: float
    missing: int
    missing_s: float
    turns_s: float = 0.0
    """The wait that its steps cause to others, if no other request there has its adapters."""

    @property
    def cost_s(self) -> float:
        """The cost that decides: tokens that are computed, though held elsewhere, take others' time."""
        return self.ttft_s + _OTHERS * (self.missing_s + self.turns_s)


@dataclass(slots=True)
class ReplicaView:
    """A router's knowledge of one replica: its last report, and what was sent since."""

    report: Report = field(default_factory=Report)
    at: float = 0.0
    is_silent: bool = True
    """Whether the replica has no channel over which it reports."""
    held: set[int] = field(default_factory=set)
    sent: dict[int, UnreportedRequest] = field(default_factory=dict)

    def update(self, report: Report, now: float) -> None:
        """Take a new report in; what was sent and is not in it still counts."""
        self.report, self.at, self.is_silent = report, now, False
        self._settle(report.requests, now)

    def silence(self, now: float) -> None:
        """Forget the report of a replica whose channel is gone: its model may be unloaded."""
        if not self.is_silent:
            self.report, self.at, self.is_silent = Report(), now, True
            self._settle(frozenset(), now)

    def book(self, prompt: RoutedPrompt, missing: int, now: float) -> None:
        """Count a request that goes there; the next one with its prefix will find it."""
        oldest = next(iter(self.sent.values()), None)
        if oldest and now - oldest.at > 2 * _FORGET_S:  # rarely, as it takes a while
            self._settle(frozenset(), now)
        self.sent[prompt.key] = UnreportedRequest(prompt, now, missing)
        self.held.update(prompt.chain)

    def _settle(self, included: Container[int], now: float) -> None:
        self.sent = {
            key: sent
            for key, sent in self.sent.items()
            if key not in included and now - sent.at <= _FORGET_S
        }
        self.held = set(self.report.blocks)
        for sent in self.sent.values():
            self.held.update(sent.prompt.chain)

    def forecast(self, prompt: RoutedPrompt, now: float) -> TTFTForecast:
        report = self.report
        prompt_token_s = report.prompt_token_s or _UNMEASURED_S
        token_s = report.token_s or _UNMEASURED_S
        n_blocks = max(n_leading(one, self.held) for one in (prompt.chain, prompt.shared))
        n_held = min(BLOCK_TOKENS * n_blocks, prompt.n_tokens - 1)
        missing = prompt.n_tokens - n_held
        elapsed = now - self.at
        n_live, work_s = report.n_live, max(0.0, report.work_s - elapsed)
        prefill_s = max(0.0, report.prefill_s - elapsed)
        if prompt.background:
            n_live += report.n_background
            work_s += max(0.0, report.background_s - elapsed)
        turns = set(report.turns)
        for sent in self.sent.values():
            if not sent.done and (prompt.background or not sent.prompt.background):
                turns.add(sent.prompt.turn)
                n_live += 1
                prefill_s += sent.missing * prompt_token_s
                work_s += sent.missing * prompt_token_s
                work_s += min(sent.prompt.max_tokens, report.answer_tokens) * token_s
        wait_s = slot_wait_s(work_s, n_live, report.n_slots)
        if (n_before := n_live - report.n_slots + 1) > 0:
            wait_s = max(wait_s, report.first_end_s - elapsed)
        if n_before > report.n_live:
            # What was sent at once ends at once, each time that all slots were full.
            n_full = math.ceil(n_before / report.n_slots) * report.n_slots
            wait_s = work_s * min(1.0, n_full / n_live)
        wait_s += self.is_silent * _SILENT_S
        missing_s, turns_s = missing * prompt_token_s, 0.0
        if turns and prompt.turn not in turns:
            turns_s = _ALONE * min(prompt.max_tokens, report.answer_tokens) * token_s
        own_s = missing_s * len(turns | {prompt.turn})
        ttft_s = first_token_s(wait_s, prefill_s, own_s, crowding_by_load(n_live / report.n_slots))
        return TTFTForecast(ttft_s, missing, missing_s, turns_s)

    def serves(self, turn: int) -> bool:
        sent = (one.prompt.turn for one in self.sent.values() if not one.done)
        return turn in self.report.turns or turn in sent


class Fleet(Generic[ReplicaT]):
    """All replicas of one deployment as one router knows them. One thread."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._views: dict[ReplicaT, ReplicaView] = {}
        self._rng = rng or random.Random()

    def __getitem__(self, replica: ReplicaT) -> ReplicaView:
        return self._views[replica]

    def update(self, replicas: Iterable[ReplicaT]) -> None:
        """Take the present replicas. The reports of all others are forgotten."""
        self._views = {one: self._views.get(one) or ReplicaView() for one in replicas}

    def hear(self, replica: ReplicaT, report: Report, at: float) -> None:
        """Takes a report of one of them, and the time when it came. The same one again changes nothing."""
        view = self._views[replica]
        if report is not view.report:
            view.update(report, at)

    def silence(self, replica: ReplicaT, now: float) -> None:
        self._views[replica].silence(now)

    def rank(self, prompt: RoutedPrompt, now: float) -> list[tuple[ReplicaT, TTFTForecast]]:
        """A sample of the replicas, the one that answers soonest first."""
        replicas = list(self._views)
        sample = self._rng.sample(replicas, min(_STRANGERS, len(replicas)))
        for other in (*self._holders(prompt.chain), *self._serving(prompt.turn)):
            if other not in sample:
                sample.append(other)
        found = [(one, self._views[one].forecast(prompt, now)) for one in sample]
        return sorted(found, key=lambda entry: entry[1].cost_s)

    def _holders(self, blocks: Chain) -> list[ReplicaT]:
        if not blocks:
            return []
        holders = [
            (n, self._rng.random(), replica)
            for replica, view in self._views.items()
            if (n := n_leading(blocks, view.held))
        ]
        longest = heapq.nlargest(_HOLDERS, holders, key=lambda entry: entry[:2])
        return [replica for _, _, replica in longest]

    def _serving(self, turn: int) -> list[ReplicaT]:
        """Replicas where those adapters are in use; those of the model itself need not be looked for."""
        if not turn:
            return []
        found = [replica for replica, view in self._views.items() if view.serves(turn)]
        return self._rng.sample(found, min(_STRANGERS, len(found)))

    def book(self, replica: ReplicaT, prompt: RoutedPrompt, missing: int, now: float) -> None:
        """The prompt goes there, and nowhere else."""
        for view in self._views.values():
            view.sent.pop(prompt.key, None)
        if replica in self._views:
            self._views[replica].book(prompt, missing, now)

    def on_send(self, replica: ReplicaT, key: int, now: float) -> None:
        """The request with that key went there, wherever it was meant to go."""
        for chosen, view in self._views.items():
            sent = view.sent.get(key)
            if sent is not None and chosen != replica:
                self.book(replica, sent.prompt, sent.missing, now)
                return

    def on_end(self, replica: ReplicaT, group: str) -> None:
        """A request of that group has ended: it is no work any more, but its prompt may be held."""
        view = self._views.get(replica)
        for sent in view.sent.values() if view else ():
            if sent.prompt.group == group and not sent.done:
                sent.done = True
                return


def crowding_by_load(load: float) -> float:
    """The factor by which streams slow prompts down, by the number of other requests for each slot."""
    return 1 + min(load, 1)


def first_token_s(wait_s: float, prefill_s: float, own_s: float, crowding: float) -> float:
    """Seconds to the first token of a prompt that takes `own_s`, behind prompts that take `prefill_s`. A
    slot is free after `wait_s`, and prompts take `crowding` times as long as without streams."""
    return max(wait_s, prefill_s * crowding) + own_s * crowding


def slot_wait_s(work_s: float, n_live: int, n_slots: int) -> float:
    """Seconds until a slot is free behind `n_live` requests that end one by one, all in `work_s`."""
    n_before = n_live - n_slots + 1
    return work_s * n_before / n_live if n_before > 0 else 0.0
