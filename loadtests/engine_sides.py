"""The two sides of `loadtests.engine`, each in a process of its own, and what one run of them gives.

They cannot share a process: libgomp counts every thread that a process ever started a team from, and
once there are more than cores, all of its teams sleep at every barrier instead of spinning.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

from loadtests.bare_loop import BareLoop, Prompt
from serve_app.engine import (
    CorralError,
    Engine,
    EngineOptions,
    GenerationRequest,
    SamplingParams,
    TokenStream,
)

ENGINE, BARE = "engine", "bare"
RUN_TIMEOUT_S = 600.0


class BenchmarkError(Exception):
    """The two sides did not do the same work: there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Run:
    """One batch on one side. Rates are in tokens per second."""

    side: str
    prompt_tokens: int
    """Of all sequences; those that were computed."""
    arrivals_s: tuple[tuple[float, ...], ...]
    """For each sequence, when each of its tokens was there, in seconds from the start."""
    steps: int
    """Calls of `llama_decode`."""
    cpu_s: float
    """CPU seconds of the process; less than threads times wall seconds if it had to wait."""
    sleeps: int
    """How often a thread of the process gave up its core, to wait for something."""
    preemptions: int
    """How often a thread lost its core to another: many mean a busy machine, and no fair figure."""

    @property
    def generated_tokens(self) -> int:
        """Of all sequences."""
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
    def decode_tps(self) -> float:
        """Generated tokens while every sequence was decoding."""
        begin = max(times[0] for times in self.arrivals_s)
        end = min(times[-1] for times in self.arrivals_s)
        rate = 0.0
        for times in self.arrivals_s:
            inside = [t for t in times if begin <= t <= end]
            if len(inside) < 2 or inside[-1] <= inside[0]:
                raise BenchmarkError("The sequences hardly decoded together: raise --max-tokens.")
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


Runner = Callable[[Sequence[Prompt], int], Run]
"""Runs the prompts, that many tokens each."""


class Side:
    """One side's process: idle, all its threads asleep, but for `run`."""

    def __init__(self, name: str, model: Path, options: EngineOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(name, model, options, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """All prompts at once, `max_tokens` tokens each. Raises what went wrong over there."""
        self._connection.send((prompts, max_tokens))
        if not self._connection.poll(2 * RUN_TIMEOUT_S):
            raise BenchmarkError(f"The {self._name} side gave no answer.")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise BenchmarkError(f"The {self._name} side's process died.") from None
        if not isinstance(answer, Run):
            raise BenchmarkError(f"The {self._name} side failed: {answer}")
        return answer

    def close(self) -> None:
        """End the process, by force if it does not follow."""
        self._connection.close()
        self._process.join(30)
        self._process.kill()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _work(name: str, model: Path, options: EngineOptions, connection: Connection) -> None:
    """The process: answers each job with a Run, or with the error that ended it."""
    opened = {ENGINE: _engine_runner, BARE: _bare_runner}[name]
    try:
        with opened(model, options) as runner:
            while True:
                connection.send(runner(*connection.recv()))
    except EOFError:
        pass
    except Exception as error:
        connection.send(repr(error))


@contextmanager
def _engine_runner(model: Path, options: EngineOptions) -> Iterator[Runner]:
    engine = Engine.load(model, options)

    def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
        before, usage = engine.stats(), _Usage()
        arrivals = asyncio.run(_read_all(engine, prompts, max_tokens))
        after = engine.stats()
        if after.generated_tokens - before.generated_tokens != sum(map(len, arrivals)):
            raise BenchmarkError("The engine's own count of tokens is another.")
        prompt_tokens = after.prompt_tokens - before.prompt_tokens
        return usage.run(ENGINE, prompt_tokens, arrivals, after.steps - before.steps)

    try:
        yield run
    finally:
        engine.close()


async def _read_all(
    engine: Engine, prompts: Sequence[Prompt], max_tokens: int
) -> list[list[float]]:
    """Submit everything at once; each stream is read by a task of its own."""
    requests = [
        GenerationRequest(
            f"sequence-{i}",
            prompt,
            SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    async with asyncio.timeout(RUN_TIMEOUT_S):
        start = time.perf_counter()
        outcomes = engine.submit_many(requests)
        return await asyncio.gather(*(_read(stream, start) for stream in outcomes))


async def _read(stream: TokenStream | CorralError, start: float) -> list[float]:
    if isinstance(stream, CorralError):
        raise stream
    times: list[float] = []
    async with stream:
        async for delta in stream:
            times += [time.perf_counter() - start] * len(delta.token_ids)
    return times


@contextmanager
def _bare_runner(model: Path, options: EngineOptions) -> Iterator[Runner]:
    with BareLoop(model, options) as loop:

        def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
            usage = _Usage()
            arrivals, steps = loop.run(prompts, max_tokens, range(len(prompts)), RUN_TIMEOUT_S)
            return usage.run(BARE, sum(map(len, prompts)), arrivals, steps)

        yield run


class _Usage:
    """What this process uses from here on."""

    def __init__(self) -> None:
        self._cpu_s = time.process_time()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def run(self, side: str, prompt_tokens: int, arrivals_s: list[list[float]], steps: int) -> Run:
        """The run that began when this was made."""
        now = resource.getrusage(resource.RUSAGE_SELF)
        return Run(
            side=side,
            prompt_tokens=prompt_tokens,
            arrivals_s=tuple(map(tuple, arrivals_s)),
            steps=steps,
            cpu_s=time.process_time() - self._cpu_s,
            sleeps=now.ru_nvcsw - self._usage.ru_nvcsw,
            preemptions=now.ru_nivcsw - self._usage.ru_nivcsw,
        )
