"""The modes that `loadtests.engine` compares, each in a process of its own.

`batched`      the engine, through its facade
`bare`         one context, one row of every sequence a step: what the engine does, without an engine
`round-robin`  one context, one row of one sequence a step, in turn
`separate`     a thread pool, a context for each sequence, the threads shared out among them
`openvino`     the engine with `backend: openvino`
`openvino-genai`  OpenVINO GenAI's own continuous batching

They cannot share a process: `process` says why.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from loadtests.common import asking
from loadtests.common.benchmark import BenchmarkError, Prompt, peak_bytes
from loadtests.engine import process
from loadtests.engine.bare_loop import RUN_TIMEOUT_S, BareLoop, BareModel
from loadtests.engine.run import Run
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams

BATCHED, BARE, ROUND_ROBIN, SEPARATE = "batched", "bare", "round-robin", "separate"
OPENVINO, GENAI = "openvino", "openvino-genai"

Runner = Callable[[Sequence[Prompt], int], Run]
"""Runs the prompts, that many tokens each."""


class ModeProcess:
    """One mode's process: idle, all its threads asleep, but for `run`."""

    def __init__(self, name: str, model: Path, options: EngineOptions) -> None:
        self._name = name
        self._pool = process.started_with(_open, name, model, options)

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> Run:
        """All prompts at once, `max_tokens` tokens each. Raises BenchmarkError for what went wrong over
        there."""
        try:
            return self._pool.submit(_run, prompts, max_tokens).result(2 * RUN_TIMEOUT_S)
        except Exception as error:
            raise BenchmarkError(f"The {self._name} mode failed: {error!r}") from error

    def __enter__(self) -> ModeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _open(name: str, model: Path, options: EngineOptions) -> Runner:
    """Over there: the mode, which stays open until the process ends."""
    return MODES[name](model, options)


def _run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
    """Over there: one run."""
    runner: Runner = process.opened()
    return runner(prompts, max_tokens)


def _batched(mode: str, model: Path, options: EngineOptions) -> Runner:
    """The engine, with llama.cpp or with OpenVINO."""
    if mode == OPENVINO:
        options = replace(options, backend="openvino", kv_unified=None)
    return partial(_run_engine, mode, Engine.load(model, options))


def _run_engine(mode: str, engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> Run:
    """Submit everything at once; the decoder thread tells each token, as it does in the server."""
    requests = [
        GenerationRequest(
            f"sequence-{i}",
            prompt,
            SamplingParams(seed=i, max_tokens=max_tokens, ignore_eos=True),
        )
        for i, prompt in enumerate(prompts)
    ]
    before, meter = engine.stats(), _Meter(mode)
    arrivals = asking.all_arrivals(engine, requests, RUN_TIMEOUT_S)
    after = engine.stats()
    if after.tokens.generated_tokens - before.tokens.generated_tokens != sum(map(len, arrivals)):
        raise BenchmarkError("The engine's own count of tokens is another.")
    prompt_tokens = after.tokens.prompt_tokens - before.tokens.prompt_tokens
    return meter.run(prompt_tokens, arrivals, after.timing.steps - before.timing.steps)


def _one_context(mode: str, model: Path, options: EngineOptions) -> Runner:
    """Bare: all sequences are one group. Round-robin: each is a group of its own."""
    return partial(measured, mode, BareLoop(BareModel(model), options))


def measured(mode: str, loop: BareLoop, prompts: Sequence[Prompt], max_tokens: int) -> Run:
    """The loop's run of these prompts, that many tokens each. Raises what the loop raises."""
    seq_ids = range(len(prompts))
    groups = [[seq_id] for seq_id in seq_ids] if mode == ROUND_ROBIN else [seq_ids]
    meter = _Meter(mode)
    arrivals, steps = loop.run(prompts, max_tokens, groups, seeds=seq_ids)
    return meter.run(sum(map(len, prompts)), arrivals, steps)


def _genai(model: Path, options: EngineOptions) -> Runner:
    """OpenVINO GenAI's own continuous batching."""
    from loadtests.engine.peers.genai import GenAiLoop  # needs corral[openvino]

    loop = GenAiLoop(model, options)

    def run(prompts: Sequence[Prompt], max_tokens: int) -> Run:
        meter = _Meter(GENAI)
        arrivals, steps = loop.run(prompts, max_tokens, range(len(prompts)))
        return meter.run(sum(map(len, prompts)), arrivals, steps)

    return run


def _separate(model: Path, options: EngineOptions) -> Runner:
    """Every context computes with `threads // n_slots` threads, at least one: together they use
    the same cores as the others, and more than those only if there are more sequences than cores."""
    n = options.n_slots
    alone = replace(options, n_slots=1, threads=max(1, options.threads // n))
    opened = BareModel(model)
    loops = [BareLoop(opened, alone) for _ in range(n)]
    pool = ThreadPoolExecutor(n)

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

    return run


MODES: dict[str, Callable[[Path, EngineOptions], Runner]] = {
    SEPARATE: _separate,
    ROUND_ROBIN: partial(_one_context, ROUND_ROBIN),
    BARE: partial(_one_context, BARE),
    BATCHED: partial(_batched, BATCHED),
    OPENVINO: partial(_batched, OPENVINO),
    GENAI: _genai,
}
"""How each mode opens its model, for as long as its process lives."""


class _Meter:
    """This process's use of time from here on, and its start."""

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
