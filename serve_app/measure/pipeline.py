"""A model in stages, in simulated time: users, engines, and passes that go through all stages. Pure.

Each node has a stage and an engine. An engine has one pass at a time on its way, and a stage computes one
at a time, in the order in which they come. No pass overtakes another. So each one's whole way is known when
it comes to the first stage.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush

from serve_app.engine.autotune.cost_model import CostModel, Profile
from serve_app.openvino.parts import ModelShape

PassSeconds = Callable[[int, int], float]
"""The seconds of a pass through a stage, by its decode and prefill rows."""
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

    def seconds_of(self, shape: ModelShape, layers: range, depth: int = 0) -> PassSeconds:
        """The seconds of passes through these layers of a model, behind `depth` tokens. They are to what
        was measured as the bytes that are read. The output is computed of decode rows, and of one row of a
        prompt."""
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

    n_slots: int
    """The requests of an engine at once."""
    prompt_tokens: int
    answer_tokens: int
    think_s: float = 0.0
    """The average of uniformly distributed times."""
    n_requests: int = 3
    """Requests of each user."""
    stall_s: float = 0.25


@dataclass(slots=True)
class ServedLoad:
    """How a load was served."""

    tokens_per_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Request:
    before_s: float
    """The time at which it was sent, and then that of the last token."""
    user: int
    n_missing: int
    """Tokens of the prompt that are not computed."""
    n_left: int


def simulated(
    stages: Sequence[PassSeconds],
    load: PipelineLoad,
    n_users: int,
    *,
    row_bytes: int,
    bytes_per_s: float,
) -> ServedLoad:
    """Serve the requests of so many users to their end. A row's hidden state has `row_bytes`, and each node
    sends so many bytes a second."""
    rng, n, served, now = random.Random(20), len(stages), ServedLoad(), 0.0
    thinking_s = [
        [rng.uniform(0, 2 * load.think_s) for _ in range(load.n_requests)] for _ in range(n_users)
    ]
    comings: list[list[tuple[float, int]]] = [[] for _ in stages]
    """The times at which the users of each engine send their next requests."""
    for user, times in enumerate(thinking_s):
        heappush(comings[user % n], (times.pop() + 1e-6 * user, user))  # never two at once
    runnings: list[list[_Request]] = [[] for _ in stages]
    passes = [(coming[0][0], node) for node, coming in enumerate(comings) if coming]
    """The times at which engines' next passes come to the first stage."""
    heapify(passes)
    free_s, sent_s = [0.0] * n, [0.0] * n
    """The times when each stage, and each node's network, have done what they were given."""
    while passes:
        now, node = heappop(passes)
        running, coming = runnings[node], comings[node]
        while coming and coming[0][0] <= now and len(running) < load.n_slots:
            running.append(_Request(*heappop(coming), load.prompt_tokens, load.answer_tokens))
        sampled = [request for request in running if not request.n_missing]
        n_decode, n_missing = len(sampled), sum(request.n_missing for request in running)
        left = n_prefill = _chunk(stages, load.stall_s, n_decode, n_missing)
        for request in running:
            if n_rows := min(left, request.n_missing):
                left, request.n_missing = left - n_rows, request.n_missing - n_rows
                sampled += [request] * (not request.n_missing)
        for stage, seconds in enumerate(stages):
            now = free_s[stage] = max(now, free_s[stage]) + seconds(n_decode, n_prefill)
            target, n_bytes = stage + 1, (n_decode + n_prefill) * row_bytes
            if target == n:
                target, n_bytes = node, len(sampled) * _RESULT_BYTES
            if target != stage:
                sent_s[stage] = max(now, sent_s[stage]) + n_bytes / bytes_per_s
                now = sent_s[stage] + _LATENCY_S
        now += _TOKEN_S * len(sampled)
        for request in sampled:
            is_first = request.n_left == load.answer_tokens
            (served.ttft_s if is_first else served.gaps_s).append(now - request.before_s)
            request.before_s, request.n_left = now, request.n_left - 1
            if not request.n_left:
                running.remove(request)
                if times := thinking_s[request.user]:
                    heappush(coming, (now + times.pop(), request.user))
        if running or coming:
            begin = now if running else max(now, coming[0][0])
            heappush(passes, (begin + _BETWEEN_S + _LATENCY_S * (node > 0), node))
    served.tokens_per_s = (len(served.ttft_s) + len(served.gaps_s)) / now
    return served


def _chunk(stages: Sequence[PassSeconds], stall_s: float, n_decode: int, n_missing: int) -> int:
    """The rows of prompts that go into the next pass."""
    sizes = [min(n, n_missing) for n in _CHUNKS]
    if not n_decode or not n_missing:
        return sizes[0]
    fitting = (n for n in sizes if sum(stage(n_decode, n) for stage in stages) <= stall_s)
    return next(fitting, sizes[-1])
