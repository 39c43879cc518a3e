"""The clients of `loadtests.engine.simulate`, and the engine that they talk to."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.common.asking import arrivals
from loadtests.common.benchmark import SEED, Prompts
from loadtests.engine import process
from serve_app.engine import (
    CorralError,
    Engine,
    EngineOptions,
    GenerationRequest,
    SamplingParams,
    TokenStream,
    Usage,
)

TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """The work of one engine."""

    clients: int
    slots: int
    requests: int
    """Of each client."""
    shared_tokens: int
    """First tokens that all prompts have in common."""
    prompt_tokens: int
    """Further tokens of each prompt."""
    min_tokens: int
    max_tokens: int
    """An answer has between `min_tokens` and this many."""
    continuous: bool
    threads: int

    def options(self) -> EngineOptions:
        """The engine that fits; nobody is refused."""
        return EngineOptions(
            n_slots=self.slots,
            n_ctx_slot=self.shared_tokens + self.prompt_tokens + self.max_tokens + 1,
            threads=self.threads,
            max_waiting=self.clients,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One request, answered. Times are seconds from the start of the simulation."""

    request_id: str
    usage: Usage
    sent_s: float
    arrivals_s: tuple[float, ...]
    """When each token came."""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last token."""
        return self.arrivals_s[-1] - self.sent_s


Requests = Sequence[GenerationRequest]
"""Of one client, in their order."""


def make_requests(scenario: Scenario, vocabulary: Sequence[int]) -> list[Requests]:
    """Each client's requests: the same, but for the shared part, whatever that part's length."""
    shared = Prompts(vocabulary, SEED + 1).draw(scenario.shared_tokens)
    own, lengths = Prompts(vocabulary), random.Random(SEED)
    return [
        [
            GenerationRequest(
                f"client-{client}-request-{number}",
                shared + own.draw(scenario.prompt_tokens),
                SamplingParams(
                    seed=client,
                    max_tokens=lengths.randint(scenario.min_tokens, scenario.max_tokens),
                    ignore_eos=True,
                ),
                client=f"client-{client}",
            )
            for number in range(scenario.requests)
        ]
        for client in range(scenario.clients)
    ]


class Simulation:
    """Plays the clients of one scenario against one engine, once."""

    def __init__(self, engine: Engine, clients: Sequence[Requests]) -> None:
        self._engine = engine
        self._clients = clients
        self._start = time.perf_counter()
        self._answers: list[Answer] = []

    async def run(self, *, continuous: bool) -> list[Answer]:
        """Every answer, in the order in which they ended. Raises what the engine raises."""
        self._start = time.perf_counter()
        async with asyncio.timeout(TIMEOUT_S):
            if continuous:
                await asyncio.gather(*map(self._client, self._clients))
            else:
                await self._batches()
        return self._answers

    async def _client(self, requests: Requests) -> None:
        for request in requests:
            sent_s = self._now()
            await self._read(request, self._engine.submit(request), sent_s)

    async def _batches(self) -> None:
        """The requests that have waited longest are in the next batch, as far as there are slots."""
        waiting = deque((0.0, deque(requests)) for requests in self._clients)
        while waiting:
            n = min(self._engine.options.n_slots, len(waiting))
            batch = [waiting.popleft() for _ in range(n)]
            streams = self._engine.submit_many([left[0] for _, left in batch])
            answers = await asyncio.gather(
                *(
                    self._read(left.popleft(), stream, sent_s)
                    for (sent_s, left), stream in zip(batch, streams, strict=True)
                )
            )
            ended = [
                (answer.arrivals_s[-1], left)
                for answer, (_, left) in zip(answers, batch, strict=True)
                if left
            ]
            waiting.extend(sorted(ended, key=lambda entry: entry[0]))

    async def _read(
        self, request: GenerationRequest, stream: TokenStream | CorralError, sent_s: float
    ) -> Answer:
        times, usage = await arrivals(stream)
        answer = Answer(request.id, usage, sent_s, tuple(t - self._start for t in times))
        self._answers.append(answer)
        return answer

    def _now(self) -> float:
        return time.perf_counter() - self._start


def play(scenario: Scenario, vocabulary: Sequence[int]) -> list[Answer]:
    """Every answer of this process's engine."""
    simulation = Simulation(process.engine(), make_requests(scenario, vocabulary))
    return asyncio.run(simulation.run(continuous=scenario.continuous))
