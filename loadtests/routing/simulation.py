"""Routers and clients of `loadtests.routing`, in simulated time: no Ray, no model, no sleeping."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Protocol

from loadtests.routing.replica import Asked, Replica, Workload, draw
from serve_app.routing.score import Fleet, Report, RoutedPrompt

# Every replica reports so often, and routers know it so much later.
_REPORT_EVERY_S, _REPORT_TAKES_S = 1.0, 0.3


class Policy(Protocol):
    """One router's way to pick a replica."""

    def pick(self, prompt: RoutedPrompt, replicas: Sequence[Replica], now: float) -> int:
        """The replica that gets the prompt."""

    def reported(self, reports: Mapping[int, Report], now: float) -> None:
        """All replicas' newest reports."""

    def ended(self, asked: Asked) -> None:
        """A request of this router's was answered."""


class RoundRobin:
    """One after the other."""

    def __init__(self, rng: random.Random) -> None:
        self._turn = count(rng.randrange(1000))

    def pick(self, prompt: RoutedPrompt, replicas: Sequence[Replica], now: float) -> int:
        """The next one."""
        return next(self._turn) % len(replicas)

    def reported(self, reports: Mapping[int, Report], now: float) -> None:
        """Nothing."""

    def ended(self, asked: Asked) -> None:
        """Nothing."""


class TwoChoices(RoundRobin):
    """Ray Serve's default: of two drawn by chance, the one with fewer requests; here it always knows."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, prompt: RoutedPrompt, replicas: Sequence[Replica], now: float) -> int:
        """The shorter queue of two."""
        return min(self._rng.sample(replicas, 2), key=lambda one: one.n_live).id


class PrefixAware:
    """Corral's own."""

    def __init__(self, rng: random.Random) -> None:
        self._fleet = Fleet[int](rng)

    def pick(self, prompt: RoutedPrompt, replicas: Sequence[Replica], now: float) -> int:
        """The one with the shortest expected time to the first token."""
        replica, found = self._fleet.rank(prompt, now)[0]
        self._fleet.book(replica, prompt, found.missing, now)
        return replica

    def reported(self, reports: Mapping[int, Report], now: float) -> None:
        """Take them in."""
        self._fleet.update(reports)
        for replica, report in reports.items():
            self._fleet.hear(replica, report, now)

    def ended(self, asked: Asked) -> None:
        """It is no work any more."""
        self._fleet.ended(asked.replica, asked.prompt.group)


class Simulation:
    """Plays a workload with one policy."""

    def __init__(self, workload: Workload, policy: Callable[[random.Random], Policy]) -> None:
        rng = random.Random(workload.seed + 1)
        n_kinds = len(workload.slower)
        self.replicas = [
            Replica(i, workload.slots, workload.slower[i % n_kinds])
            for i in range(workload.replicas)
        ]
        self._routers = [policy(rng) for _ in range(workload.routers)]
        self._left = draw(workload)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._ties = count()
        self._n_live = 0
        self.answered: list[Asked] = []
        self.worst_imbalance = 0.0
        self.worst_backlog_s = 0.0
        """The longest backlog of a replica; over the average one's, while most have work; at any time."""
        self._report(-_REPORT_TAKES_S)
        for _ in range(workload.clients):
            self._at(rng.uniform(0, 5), self._send)

    def run(self) -> None:
        """Until everything is answered."""
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ties), happen))

    def _send(self, now: float) -> None:
        asked = next(self._left, None)
        if asked is None:
            return
        asked.sent_s = now
        self._n_live += 1
        router = self._routers[asked.prompt.key % len(self._routers)]
        replica = self.replicas[router.pick(asked.prompt, self.replicas, now)]
        replica.submit(asked)
        if not replica.stepping:
            replica.stepping = True
            self._step(replica, now)

    def _step(self, replica: Replica, now: float) -> None:
        if not replica.n_live:
            replica.stepping = False
            return
        step_s, ended = replica.step(now)
        self._at(now + step_s, lambda then: self._step(replica, then))
        for asked in ended:
            self._at(asked.ended_s, partial(self._end, asked))

    def _end(self, asked: Asked, now: float) -> None:
        self.answered.append(asked)
        self._n_live -= 1
        self._routers[asked.prompt.key % len(self._routers)].ended(asked)
        self._send(now)

    def _report(self, now: float) -> None:
        reports = {replica.id: replica.report() for replica in self.replicas}
        work = [report.work_s for report in reports.values()]
        self.worst_backlog_s = max(self.worst_backlog_s, *work)
        if sum(map(bool, work)) > len(work) / 2:
            self.worst_imbalance = max(self.worst_imbalance, max(work) * len(work) / sum(work))
        for router in self._routers:
            self._at(now + _REPORT_TAKES_S, partial(router.reported, reports))
        if self._n_live or now < 0:
            self._at(now + _REPORT_EVERY_S, self._report)
