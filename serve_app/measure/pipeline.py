"""A model in stages, in simulated time: users, engines, and passes that go through all stages. Pure.

Each node has a stage and an engine. An engine has one pass at a time on its way, and a stage computes one
at a time, in the order in which they come. So passes of one engine are computed while those of others are.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count

from serve_app.engine.autotune.cost_model import CostModel, Profile
from serve_app.openvino.parts import ModelShape

# Bytes of what is sent for a token: the highest logits, of which samplers take 40 by default.
_RESULT_BYTES = 400
_LATENCY_S = 0.0001
# The engine's own seconds between two passes, and for each token: estimates, near the 0.6B model's.
_BETWEEN_S, _TOKEN_S = 0.001, 0.0002
# Rows of a prompt in one pass, from which the largest is taken that keeps a pass within the stall budget.
_CHUNKS = (512, 256, 128, 64, 32, 16)


@dataclass(frozen=True, slots=True)
class MeasuredLayers:
    """The times of passes through some layers and the output, as a machine was measured to take them."""

    shape: ModelShape
    profile: Profile

    def seconds_of(
        self, shape: ModelShape, layers: range, depth: int = 0
    ) -> Callable[[int, int], float]:
        """The seconds of a pass through these layers of a model, by its decode and prefill rows, behind
        `depth` tokens. They are to what was measured as the bytes that are read. The output is computed of
        decode rows, and of one row of a prompt."""
        costs, is_last = CostModel(self.profile), layers.stop == len(shape.layer_bytes)

        def output_s(n_rows: int) -> float:
            part = self.shape.output_bytes / sum(self.shape.read_bytes(n_rows))
            return part * costs.decode_s(n_rows)

        @cache
        def seconds(n_decode: int, n_prefill: int) -> float:
            n_rows, n_sampled = n_decode + n_prefill, n_decode or 1
            if n_prefill:
                layers_s = costs.prefill_s(n_rows, depth / 2) - output_s(1)
            else:
                layers_s = costs.decode_s(n_rows, depth) - output_s(n_rows)
            read = shape.read_bytes(n_rows, 0.0)[layers.start : layers.stop]
            layers_s *= sum(read) / sum(self.shape.read_bytes(n_rows, 0.0))
            of_output = shape.output_bytes / self.shape.output_bytes * is_last
            return layers_s + of_output * output_s(n_sampled)

        return seconds


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """Requests of users, each of whom sends the next one some time after an answer."""

    n_users: int
    prompt_tokens: int
    answer_tokens: int
    think_s: float = 0.0
    """The average of uniformly distributed times."""
    n_requests: int = 3
    """Requests of each user."""


@dataclass(slots=True)
class _Request:
    n_missing: int
    """Tokens of the prompt that are not computed."""
    n_left: int
    before_s: float
    """The time at which it was sent, and then that of the last token."""
    follow: Callable[[float], None]
    """Called at its end."""
    is_new: bool = True


@dataclass(slots=True)
class _Engine:
    node: int
    waiting: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    is_computing: bool = False


class Pipeline:
    """A chain of stages that serves a load to its end."""

    def __init__(
        self,
        stages: list[Callable[[int, int], float]],
        *,
        n_slots: int,
        row_bytes: int,
        bytes_per_s: float,
        stall_s: float = 0.25,
        n_at_once: int | None = None,
    ) -> None:
        """`stages` tell the seconds of passes by their decode and prefill rows. Each engine has `n_slots`.
        A row's hidden state has `row_bytes`, and each node sends so many bytes a second. `n_at_once` bounds
        the stages that compute at once, where they share processors."""
        self._stages, self._n_slots, self._row_bytes = stages, n_slots, row_bytes
        self._bytes_per_s, self._stall_s = bytes_per_s, stall_s
        self._free_s, self._sent_s = [0.0] * len(stages), [0.0] * len(stages)
        """The times when each stage, and each node's network, have done what they were given."""
        self._processors = [0.0] * (n_at_once or len(stages))
        self._engines = [_Engine(node) for node in range(len(stages))]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._ties = count()
        self.ttft_s: list[float] = []
        self.gaps_s: list[float] = []
        self.tokens_per_s = 0.0

    def run(self, load: PipelineLoad) -> None:
        """Serve the load; `tokens_per_s` and the times of tokens tell how."""
        rng = random.Random(20)
        for user in range(load.n_users):
            engine = self._engines[user % len(self._engines)]
            times = [rng.uniform(0, 2 * load.think_s) for _ in range(load.n_requests)]
            self._at(times.pop(), partial(self._send, engine, load, times))
        now = 0.0
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        self.tokens_per_s = (len(self.ttft_s) + len(self.gaps_s)) / now

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ties), happen))

    def _send(self, engine: _Engine, load: PipelineLoad, times: list[float], now: float) -> None:
        def follow(now: float) -> None:
            if times:
                self._at(now + times.pop(), partial(self._send, engine, load, times))

        engine.waiting.append(_Request(load.prompt_tokens, load.answer_tokens, now, follow))
        if not engine.is_computing:
            engine.is_computing = True
            self._begin(engine, now)

    def _begin(self, engine: _Engine, now: float) -> None:
        """Begin an engine's next pass: the next token of each answer, and rows of prompts."""
        while engine.waiting and len(engine.running) < self._n_slots:
            engine.running.append(engine.waiting.popleft())
        engine.is_computing = bool(engine.running)
        if not engine.running:
            return
        sampled = [request for request in engine.running if not request.n_missing]
        prompts = [request for request in engine.running if request.n_missing]
        n_decode, n_prefill = len(sampled), 0
        if prompts:
            n_prefill = left = self._chunk(n_decode, sum(prompt.n_missing for prompt in prompts))
        for prompt in prompts:
            n_rows = min(left, prompt.n_missing)
            left, prompt.n_missing = left - n_rows, prompt.n_missing - n_rows
            if not prompt.n_missing:
                sampled.append(prompt)
        last = len(self._stages) - 1

        def compute(stage: int, now: float) -> None:
            processor = heapq.heappop(self._processors)
            begin = max(now, processor, self._free_s[stage])
            end = self._free_s[stage] = begin + self._stages[stage](n_decode, n_prefill)
            heapq.heappush(self._processors, end)
            self._at(end, partial(computed, stage))

        def computed(stage: int, now: float) -> None:
            if stage == last:
                self._send_on(last, engine.node, len(sampled) * _RESULT_BYTES, now, ended)
            else:
                n_bytes = (n_decode + n_prefill) * self._row_bytes
                self._send_on(stage, stage + 1, n_bytes, now, partial(compute, stage + 1))

        def ended(now: float) -> None:
            now += _TOKEN_S * len(sampled)
            for request in sampled:
                (self.ttft_s if request.is_new else self.gaps_s).append(now - request.before_s)
                request.is_new, request.before_s, request.n_left = False, now, request.n_left - 1
                if not request.n_left:
                    engine.running.remove(request)
                    request.follow(now)
            self._at(now + _BETWEEN_S, partial(self._begin, engine))

        self._send_on(engine.node, 0, 0, now, partial(compute, 0))

    def _send_on(
        self, source: int, target: int, n_bytes: int, now: float, arrive: Callable[[float], None]
    ) -> None:
        if source != target:
            self._sent_s[source] = max(now, self._sent_s[source]) + n_bytes / self._bytes_per_s
            now = self._sent_s[source] + _LATENCY_S
        self._at(now, arrive)

    def _chunk(self, n_decode: int, n_missing: int) -> int:
        """The rows of prompts that go into the next pass."""
        sizes = [min(n, n_missing) for n in _CHUNKS]
        if not n_decode:
            return sizes[0]
        pass_s = (sum(stage(n_decode, n) for stage in self._stages) for n in sizes)
        fitting = (n for n, s in zip(sizes, pass_s, strict=True) if s <= self._stall_s)
        return next(fitting, sizes[-1])
