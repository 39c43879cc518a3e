"""The modes that `loadtests.engine` compares, each in a process of its own.

`batched`      the engine, through its facade
`bare`         one context, one row of every sequence a step: what the engine does, without an engine
`round-robin`  one context, one row of one sequence a step, in turn
`separate`     a thread pool, a context for each sequence, the threads shared out among them

They cannot share a process: peak memory would be of all, and libgomp counts every thread that a process
ever started a team from; once there are more than cores, all of its teams sleep at every barrier
instead of spinning.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from loadtests.common.benchmark import BenchmarkError, Prompt, peak_bytes
from loadtests.engine.bare_loop import RUN_TIMEOUT_S, BareLoop, BareModel
from loadtests.engine.run import Run
from serve_app.engine import (
    CorralError,
    Engine,
    EngineOptions,
    GenerationRequest,
    SamplingParams,
    TokenStream,
)

BATCHED, BARE, ROUND_ROBIN, SEPARATE = "batched", "bare", "round-robin", "separate"

Runner = Callable[[Sequence[Prompt], int], Run]
"""Runs the prompts, that many tokens each."""


class ModeProcess:
    """One mode's process: idle, all its threads asleep, but for `run`."""

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
            raise BenchmarkError(f"The {self._name} mode gave no answer.")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise BenchmarkError(f"The {self._name} mode's process died.") from None
        if not isinstance(answer, Run):
            raise BenchmarkError(f"The {self._name} mode failed: {answer}")
        return answer

    def close(self) -> None:
        """End the process, by force if it does not follow."""
        self._connection.close()
        self._process.join(30)
        self._process.kill()

    def __enter__(self) -> ModeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _work(name: str, model: Path, options: EngineOptions, connection: Connection) -> None:
    """The process: answers each call with a Run, or with the error that ended it."""
    try:
        with MODES[name](model, options) as runner:
            while True:
                connection.send(runner(*connection.recv()))
    except EOFError:
        pass
    except Exception as error:
        connection.send(repr(error))


@contextmanager
def _batched(model: Path, options: EngineOptions) -> Iterator[Runner]:
    engine = Engine.load(model, options)

    def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
        return asyncio.run(_run_engine(engine, prompts, max_tokens))

    try:
        yield run
    finally:
        engine.close()


async def _run_engine(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> Run:
    """Submit everything at once; each stream is read by an asyncio task of its own."""
    requests = [
        GenerationRequest(
            f"sequence-{i}",
            prompt,
            SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    before, meter = engine.stats(), _Meter(BATCHED)
    async with asyncio.timeout(RUN_TIMEOUT_S):
        outcomes = engine.submit_many(requests)
        arrivals = await asyncio.gather(*(_read(stream) for stream in outcomes))
    after = engine.stats()
    if after.generated_tokens - before.generated_tokens != sum(map(len, arrivals)):
        raise BenchmarkError("The engine's own count of tokens is another.")
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    return meter.run(prompt_tokens, arrivals, after.steps - before.steps)


async def _read(stream: TokenStream | CorralError) -> list[float]:
    if isinstance(stream, CorralError):
        raise stream
    times: list[float] = []
    async with stream:
        async for delta in stream:
            times += [time.perf_counter()] * len(delta.token_ids)
    return times


@contextmanager
def _one_context(mode: str, model: Path, options: EngineOptions) -> Iterator[Runner]:
    """Bare: all sequences are one group. Round-robin: each is a group of its own."""
    with BareModel(model) as opened, BareLoop(opened, options) as loop:

        def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
            seq_ids = range(len(prompts))
            groups = [seq_ids] if mode == BARE else [[seq_id] for seq_id in seq_ids]
            meter = _Meter(mode)
            arrivals, steps = loop.run(prompts, max_tokens, groups, seeds=seq_ids)
            return meter.run(sum(map(len, prompts)), arrivals, steps)

        yield run


@contextmanager
def _separate(model: Path, options: EngineOptions) -> Iterator[Runner]:
    """Every context computes with `threads // n_slots` threads, at least one: together they use
    the same cores as the others, and more than those only if there are more sequences than cores."""
    n = options.n_slots
    alone = replace(options, n_slots=1, threads=max(1, options.threads // n))
    with BareModel(model) as opened, ExitStack() as stack:
        loops = [stack.enter_context(BareLoop(opened, alone)) for _ in range(n)]
        pool = stack.enter_context(ThreadPoolExecutor(n))

        def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
            meter = _Meter(SEPARATE)
            futures = [
                pool.submit(loop.run, [prompt], max_tokens, [[0]], [seed])
                for seed, (loop, prompt) in enumerate(zip(loops, prompts, strict=True))
            ]
            results = [future.result() for future in futures]
            arrivals = [times for (times,), _ in results]
            steps = sum(steps for _, steps in results)
            return meter.run(sum(map(len, prompts)), arrivals, steps)

        yield run


MODES: dict[str, Callable[[Path, EngineOptions], AbstractContextManager[Runner]]] = {
    SEPARATE: _separate,
    ROUND_ROBIN: partial(_one_context, ROUND_ROBIN),
    BARE: partial(_one_context, BARE),
    BATCHED: _batched,
}
"""How each mode opens its model."""


class _Meter:
    """What this process uses from here on, and when it was made."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._cpu_s = time.process_time()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._start = time.perf_counter()

    def run(self, prompt_tokens: int, arrivals: Sequence[Sequence[float]], steps: int) -> Run:
        """The run that began when this was made; arrivals by `time.perf_counter()`."""
        now = resource.getrusage(resource.RUSAGE_SELF)
        return Run(
            mode=self._mode,
            prompt_tokens=prompt_tokens,
            arrivals_s=tuple(tuple(t - self._start for t in times) for times in arrivals),
            steps=steps,
            cpu_s=time.process_time() - self._cpu_s,
            sleeps=now.ru_nvcsw - self._usage.ru_nvcsw,
            preemptions=now.ru_nivcsw - self._usage.ru_nivcsw,
            peak_bytes=peak_bytes(),
        )
