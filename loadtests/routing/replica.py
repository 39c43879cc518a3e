"""Simulated replicas and what is asked of them, for `loadtests.routing`. Pure.

A replica decodes all its running requests together and computes one prompt beside, in chunks that keep a
step within the stall budget, as the engine does; its times are those of a measured machine, made slower by
a factor. It keeps the prompts used last, its slots' and as many more in memory.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.routing.blocks import BLOCK_TOKENS, MAX_BLOCKS, Chain
from serve_app.routing.score import Report, RoutedPrompt

# A 0.6B model (Q4_0) on two cores: seconds of a decode step, and for each row of it; of a prompt token.
_STEP_S, _ROW_S, _PROMPT_TOKEN_S = 0.010, 0.00425, 0.002
_STALL_S, _MOST_ROWS = 0.25, 512


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests, and the number of replicas."""

    replicas: int = 64
    slots: int = 16
    clients: int = 640
    """Each sends its next request when the last was answered."""
    requests: int = 10_000
    prefixes: int = 500
    """Shared beginnings, drawn by Zipf's law with this exponent."""
    zipf: float = 1.0
    prefix_tokens: int = 1024
    own_tokens: int = 128
    answer_tokens: int = 64
    """On average; between half and one and a half of it."""
    routers: int = 4
    """Ingress replicas, each with a router of its own."""
    slower: tuple[float, ...] = (1.0, 1.0, 2.0, 3.0)
    """Factors on the replicas' times, in turns."""
    seed: int = 20


@dataclass(slots=True)
class Asked:
    """One request."""

    prompt: RoutedPrompt
    n_answer: int
    sent_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    n_cached: int = 0
    n_missing: int = 0
    n_done: int = 0
    replica: int = 0


def draw(workload: Workload) -> Iterator[Asked]:
    """The requests, the same ones for the same seed."""
    rng = random.Random(workload.seed)
    ranks = range(1, workload.prefixes + 1)
    weights = [1 / rank**workload.zipf for rank in ranks]
    n_shared, n_own = (n // BLOCK_TOKENS for n in (workload.prefix_tokens, workload.own_tokens))
    shared = {rank: tuple(rng.getrandbits(32) for _ in range(n_shared)) for rank in ranks}
    drawn = rng.choices(ranks, weights, k=workload.requests)
    for key, rank in enumerate(drawn):
        blocks = shared[rank] + tuple(rng.getrandbits(32) for _ in range(n_own))
        n_answer = rng.randint(workload.answer_tokens // 2, 3 * workload.answer_tokens // 2)
        prompt = RoutedPrompt(key, BLOCK_TOKENS * len(blocks) + 1, blocks, n_answer, str(key))
        yield Asked(prompt, n_answer)


@dataclass(slots=True)
class Replica:
    """One simulated engine."""

    id: int
    n_slots: int
    slower: float
    waiting: deque[Asked] = field(default_factory=deque)
    running: list[Asked] = field(default_factory=list)
    kept: OrderedDict[Chain, None] = field(default_factory=OrderedDict)
    """Prompts in slots and memory, the least recently used first."""
    taken: deque[int] = field(default_factory=lambda: deque(maxlen=256))
    stepping: bool = False

    @property
    def n_live(self) -> int:
        """Requests that run or wait."""
        return len(self.waiting) + len(self.running)

    def submit(self, asked: Asked) -> None:
        """Queue a request."""
        asked.replica = self.id
        self.taken.append(asked.prompt.key)
        self.waiting.append(asked)

    def step(self, now: float) -> tuple[float, list[Asked]]:
        """Seconds that the next step takes, and the requests that end with it."""
        self._admit()
        decoding = [one for one in self.running if not one.n_missing]
        step_s = (_STEP_S + _ROW_S * len(decoding)) * self.slower if decoding else 0.0
        prefilling = next((one for one in self.running if one.n_missing), None)
        if prefilling:
            token_s = _PROMPT_TOKEN_S * self.slower
            room = int(max(_STALL_S - step_s, step_s) / token_s) if decoding else _MOST_ROWS
            n_rows = min(prefilling.n_missing, _MOST_ROWS, max(1, room))
            prefilling.n_missing -= n_rows
            step_s += n_rows * token_s
            if not prefilling.n_missing:
                prefilling.first_s = now + step_s
                prefilling.n_done = 1
        ended = []
        for one in decoding:
            one.n_done += 1
            if one.n_done >= one.n_answer:
                one.ended_s = now + step_s
                ended.append(one)
        self.running = [one for one in self.running if one not in ended]
        return step_s, ended

    def _admit(self) -> None:
        """A request that finds a slot starts from the longest kept prefix, unless that is being
        computed."""
        computing = {one.prompt.chain for one in self.running if one.n_missing}
        passed = deque[Asked]()
        while self.waiting and len(self.running) < self.n_slots:
            asked = self.waiting.popleft()
            wanted = asked.prompt.chain
            n_coming = max((_shared(wanted, chain) for chain in computing), default=0)
            ready = (chain for chain in self.kept if chain not in computing)
            n_kept = max((_shared(wanted, chain) for chain in ready), default=0)
            if n_coming > n_kept:
                passed.append(asked)
                continue
            asked.n_cached = BLOCK_TOKENS * n_kept
            asked.n_missing = asked.prompt.n_tokens - asked.n_cached
            self.kept[wanted] = None
            self.kept.move_to_end(wanted)
            while len(self.kept) > 2 * self.n_slots:
                self.kept.popitem(last=False)
            computing.add(wanted)
            self.running.append(asked)
        self.waiting.extendleft(reversed(passed))

    def report(self) -> Report:
        """The report for routers."""
        token_s = (_STEP_S / self.n_slots + _ROW_S) * self.slower
        prompt_token_s = _PROMPT_TOKEN_S * self.slower
        live = [*self.running, *self.waiting]
        missing = sum(one.n_missing if one in self.running else one.prompt.n_tokens for one in live)
        left = sum(one.n_answer - one.n_done for one in live)
        blocks = {block: None for chain in reversed(self.kept) for block in chain}
        return Report(
            n_slots=self.n_slots,
            n_live=self.n_live,
            work_s=missing * prompt_token_s + left * token_s,
            prefill_s=missing * prompt_token_s,
            prompt_token_s=prompt_token_s,
            token_s=token_s,
            blocks=frozenset(tuple(blocks)[:MAX_BLOCKS]),
            requests=frozenset(self.taken),
        )


def _shared(a: Chain, b: Chain) -> int:
    return bisect_left(range(min(len(a), len(b))), True, key=lambda place: a[place] != b[place])
