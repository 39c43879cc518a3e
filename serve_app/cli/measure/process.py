"""Engines and other programs to measure, each in a process of its own, and the figures of their runs.

Processes have a peak of memory of their own, and threads. libgomp counts every thread that a process
ever started a team from. Once there are more than cores, all of its teams sleep at every barrier
instead of spinning.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from serve_app.base.engine_options import KernelsName
from serve_app.base.errors import CorralError
from serve_app.cli.measure.benchmark import BenchmarkError, Prompt, peak_bytes
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenDelta
from serve_app.kernels.llama.model import Model

RUN_TIMEOUT_S = 600.0

_opened: Any = None


def start_process(open_one: Callable[..., object], *arguments: object) -> ProcessPoolExecutor:
    """A new process that calls this first, for `opened()`; what is submitted runs on its one thread."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, _open, (partial(open_one, *arguments),))


def opened_object() -> Any:
    """The object that this process has opened when it started; None if nothing."""
    return _opened


def _open(open_one: Callable[[], object]) -> None:
    global _opened
    _opened = open_one()


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run, timed by the process that did it. Rates are in tokens per second."""

    prompt_tokens: int
    """Prompt tokens that were computed, of all sequences."""
    arrivals_s: tuple[tuple[float, ...], ...]
    """The times when each sequence's tokens were there, in seconds from the start."""
    peak_bytes: int
    """The most memory that the process had resident up to now: model, contexts and Python."""

    @property
    def generated_tokens(self) -> int:
        return sum(len(times) for times in self.arrivals_s)

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the last token."""
        return max(times[-1] for times in self.arrivals_s)

    @property
    def whole_tps(self) -> float:
        """Generated tokens over the whole run, prompts included."""
        return self.generated_tokens / self.wall_s

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens until every sequence had its first token."""
        return self.prompt_tokens / max(times[0] for times in self.arrivals_s)

    @property
    def decode_tps(self) -> float | None:
        """Generated tokens while every sequence was decoding; None if they hardly ever all were."""
        begin = max(times[0] for times in self.arrivals_s)
        end = min(times[-1] for times in self.arrivals_s)
        rate = 0.0
        for times in self.arrivals_s:
            inside = [t for t in times if begin <= t <= end]
            if len(inside) < 2 or inside[-1] <= inside[0]:
                return None
            rate += (len(inside) - 1) / (inside[-1] - inside[0])
        return rate

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first token, of each sequence."""
        return [times[0] for times in self.arrivals_s]

    @property
    def itl_s(self) -> list[float]:
        """Seconds between tokens that follow each other; 0 for two that came together."""
        return [b - a for times in self.arrivals_s for a, b in pairwise(times)]


Runner = Callable[[Sequence[Prompt], int], MeasuredRun]
Opener = Callable[[Path, EngineOptions], Runner]
"""Opens a model with the sizes of an engine, for as long as its process lives."""


class RunnerProcess:
    """The process of one program to measure: idle, all its threads asleep, but for `run`."""

    def __init__(self, name: str, opener: Opener, model: Path, options: EngineOptions) -> None:
        self._name = name
        self._pool = start_process(opener, model, options)

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> MeasuredRun:
        """Run all prompts at once, `max_tokens` tokens each. Raises BenchmarkError if the process fails."""
        try:
            return self._pool.submit(_run, prompts, max_tokens).result(2 * RUN_TIMEOUT_S)
        except Exception as error:
            raise BenchmarkError(f"The {self._name} mode failed: {error!r}") from error

    def __enter__(self) -> RunnerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _run(prompts: Sequence[Prompt], max_tokens: int) -> MeasuredRun:
    runner: Runner = opened_object()
    return runner(prompts, max_tokens)


def engine_runner(backend: KernelsName, model: Path, options: EngineOptions) -> Runner:
    """Open an engine with this backend. Raises CorralError."""
    return partial(_time_engine, open_engine(backend, model, options))


def open_engine(backend: KernelsName, model: Path, options: EngineOptions) -> Engine:
    """An engine with this backend. Raises CorralError."""
    if backend == "openvino":
        options = replace(options, backend=backend, kv_unified=None)
    return Engine.load(model, options)


def _time_engine(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> MeasuredRun:
    start = time.perf_counter()
    prompt_tokens, arrivals = run_engine(engine, prompts, max_tokens)
    arrivals_s = tuple(tuple(when - start for when in times) for times in arrivals)
    return MeasuredRun(prompt_tokens, arrivals_s, peak_bytes())


def run_engine(
    engine: Engine, prompts: Sequence[Prompt], max_tokens: int
) -> tuple[int, list[list[float]]]:
    """Submit everything at once; the decoder thread tells each token, as in a server. Returns how many
    prompt tokens were computed, and the times of each sequence's tokens by `time.perf_counter()`."""
    requests = [
        GenerationRequest(
            f"sequence-{i}", prompt, SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True)
        )
        for i, prompt in enumerate(prompts)
    ]
    before = engine.stats().tokens
    arrivals = all_arrivals(engine, requests, RUN_TIMEOUT_S)
    after = engine.stats().tokens
    if after.generated_tokens - before.generated_tokens != sum(map(len, arrivals)):
        raise BenchmarkError("The engine's own count of tokens is another.")
    return after.prompt_tokens - before.prompt_tokens, arrivals


class Arrivals:
    """A sink, as the server has them: the decoder thread calls it, and no other thread computes."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ended = Future[None]()

    def __call__(self, delta: TokenDelta) -> None:
        self.times += [time.perf_counter()] * len(delta.token_ids)
        if delta.end is None:
            return
        if delta.end.error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(delta.end.error)


def all_arrivals(
    engine: Engine, requests: Sequence[GenerationRequest], timeout_s: float
) -> list[list[float]]:
    """The times when each token of each request was told. Raises refusals, errors of requests, and
    TimeoutError."""
    sinks = [Arrivals() for _ in requests]
    deadline = time.monotonic() + timeout_s
    for outcome in engine.submit_to(list(zip(requests, sinks, strict=True))):
        if isinstance(outcome, CorralError):
            raise outcome
    for sink in sinks:
        sink.ended.result(deadline - time.monotonic())
    return [sink.times for sink in sinks]


def text_tokens(path: Path) -> list[int]:
    """Every token of a GGUF file's vocabulary that stands for text: none that controls or ends."""
    model = Model(path, vocab_only=True)
    tokens = range(model.n_vocab)
    return [token for token in tokens if model.piece(token) and not model.is_eog(token)]
