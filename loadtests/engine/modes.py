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

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from loadtests.engine.bare_loop import BareLoop, BareModel
from loadtests.engine.run import Meter, ModeRun
from serve_app.base.engine_options import KernelsName
from serve_app.cli.measure.benchmark import Prompt
from serve_app.cli.measure.process import Opener, Runner, RunnerProcess, open_engine, run_engine
from serve_app.engine import EngineOptions

BATCHED, BARE, ROUND_ROBIN, SEPARATE = "batched", "bare", "round-robin", "separate"
OPENVINO, GENAI = "openvino", "openvino-genai"


def mode_process(name: str, model: Path, options: EngineOptions) -> RunnerProcess:
    """The process of a mode."""
    return RunnerProcess(name, MODES[name], model, options)


def _one_context(mode: str, model: Path, options: EngineOptions) -> Runner:
    """Bare: all sequences are one group. Round-robin: each is a group of its own."""
    return partial(measured, mode, BareLoop(BareModel(model), options))


def measured(mode: str, loop: BareLoop, prompts: Sequence[Prompt], max_tokens: int) -> ModeRun:
    """The loop's run of these prompts, that many tokens each. Raises what the loop raises."""
    seq_ids = range(len(prompts))
    groups = [[seq_id] for seq_id in seq_ids] if mode == ROUND_ROBIN else [seq_ids]
    meter = Meter(mode)
    arrivals, steps = loop.run(prompts, max_tokens, groups, seeds=seq_ids)
    return meter.run(sum(map(len, prompts)), arrivals, steps)


def _engine(mode: str, backend: KernelsName, model: Path, options: EngineOptions) -> Runner:
    """Corral's engine with this backend."""
    engine = open_engine(backend, model, options)

    def run(prompts: Sequence[Prompt], max_tokens: int) -> ModeRun:
        steps, meter = engine.stats().timing.steps, Meter(mode)
        prompt_tokens, arrivals = run_engine(engine, prompts, max_tokens)
        return meter.run(prompt_tokens, arrivals, engine.stats().timing.steps - steps)

    return run


def _genai(model: Path, options: EngineOptions) -> Runner:
    """OpenVINO GenAI's own continuous batching."""
    from loadtests.engine.peers.genai import GenAiLoop  # needs corral[openvino]

    loop = GenAiLoop(model, options)

    def run(prompts: Sequence[Prompt], max_tokens: int) -> ModeRun:
        meter = Meter(GENAI)
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

    def run(prompts: Sequence[Prompt], max_tokens: int) -> ModeRun:
        meter = Meter(SEPARATE)
        futures = [
            pool.submit(loop.run, [prompt], max_tokens, [[0]], [seed])
            for seed, (loop, prompt) in enumerate(zip(loops, prompts, strict=True))
        ]
        results = [future.result() for future in futures]
        arrivals = [times for (times,), _ in results]
        steps = sum(steps for _, steps in results)
        return meter.run(sum(map(len, prompts)), arrivals, steps)

    return run


MODES: dict[str, Opener] = {
    SEPARATE: _separate,
    ROUND_ROBIN: partial(_one_context, ROUND_ROBIN),
    BARE: partial(_one_context, BARE),
    BATCHED: partial(_engine, BATCHED, "llama.cpp"),
    OPENVINO: partial(_engine, OPENVINO, "openvino"),
    GENAI: _genai,
}
"""How each mode opens its model, for as long as its process lives."""
