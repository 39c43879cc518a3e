"""The engine beside other ways to serve the same requests with llama.cpp. No Ray, no HTTP.

    python -m loadtests.engine --model PATH [--modes separate,round-robin,bare,batched]
        [--sequences 1,2,4,8,16] [--prompt-tokens 128] [--max-tokens 64] [--rounds 3] [--threads N]
        [--batched-bench PATH] [--json FILE] [--plot FILE.svg]

Modes, `bare,batched` by default:
    separate     a thread pool, a context for each sequence; each computes with threads / sequences
                 threads, at least one
    round-robin  one context, one row of one sequence a step, in turn
    bare         one context, one row of every sequence a step, in the least Python that can do it
    batched      the engine
    openvino     the engine with `backend: openvino`
    openvino-genai  OpenVINO GenAI's ContinuousBatchingPipeline, with the same converted model, threads,
                 precision and format of the cache, and prompts
With --batched-bench, llama.cpp's own `llama-batched-bench` as well.

All of them get the same model file, threads, lengths and number of tokens, and all but llama.cpp's own
the same prompts and sampler chain; each is a process of its own, and they take turns: A B C, C B A, ...
Every round has fresh random prompts, the same in every invocation, so that nobody finds a prefix in its
cache. Compare the modes of one round, not the figures of two machines or days. All modes stay open
meanwhile: each needs memory for the model. A quiet machine shows two busy cores for two threads and few
preemptions in the progress lines.

A run that gives another number of tokens than asked for ends the benchmark with an error. A mode whose
sequences hardly ever decoded at the same time has no speed of decoding.

Progress goes to stderr, a Markdown table to stdout, and every single run to the JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.engine.batched_bench import NATIVE, BatchedBench
from loadtests.engine.modes import BARE, BATCHED, MODES, mode_process
from loadtests.engine.report import plot, summary, table
from loadtests.engine.run import AnyRun, ModeRun, NativeRun
from serve_app.cli.measure.bench import WARM_UP_TOKENS, add_load_arguments, engine_options
from serve_app.cli.measure.benchmark import (
    BenchmarkError,
    Prompts,
    choice,
    in_turns,
    list_of,
    machine,
)
from serve_app.cli.measure.process import RunnerProcess, text_tokens
from serve_app.engine import EngineOptions


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one invocation."""

    model: Path
    modes: tuple[str, ...]
    sequences: tuple[int, ...]
    """How many at once: for each number, all modes start anew."""
    prompt_tokens: int
    """Of each sequence."""
    max_tokens: int
    """Of each sequence; exactly as many are generated."""
    rounds: int
    threads: int
    batched_bench: Path | None = None

    def options(self, sequences: int) -> EngineOptions:
        """The engine that fits; the other modes copy its sizes."""
        return engine_options(sequences, self.prompt_tokens, self.max_tokens, threads=self.threads)

    def facts(self) -> dict[str, Any]:
        """The facts that the figures depend on."""
        return machine(self.model, self.threads) | {
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "rounds": self.rounds,
        }


def check(run: AnyRun, sequences: int, prompt_tokens: int, max_tokens: int) -> None:
    """Raises BenchmarkError unless the run did exactly the work that was asked for: so many tokens of
    each sequence."""
    if isinstance(run, NativeRun):
        if run.generated_tokens != sequences * max_tokens:
            raise BenchmarkError(f"{run.mode} generated {run.generated_tokens} tokens.")
    else:
        counts = [len(times) for times in run.arrivals_s]
        if counts != [max_tokens] * sequences:
            raise BenchmarkError(f"{run.mode} generated {counts} tokens, not {max_tokens} each.")
    if run.prompt_tokens != prompt_tokens * sequences:
        raise BenchmarkError(f"{run.mode} computed {run.prompt_tokens} prompt tokens.")


def measure(sequences: int, settings: Settings, prompts: Prompts) -> list[dict[str, AnyRun]]:
    """A short warm-up and then `rounds` runs of each mode, in turns."""
    options = settings.options(sequences)
    with ExitStack() as stack:
        opened: dict[str, RunnerProcess | BatchedBench] = {
            mode: stack.enter_context(mode_process(mode, settings.model, options))
            for mode in settings.modes
        }
        if settings.batched_bench is not None:
            opened[NATIVE] = BatchedBench(settings.batched_bench, settings.model, options)
        drawn = [
            [prompts.draw(settings.prompt_tokens) for _ in range(sequences)]
            for _ in range(settings.rounds + 1)
        ]

        def run(number: int, mode: str) -> AnyRun:
            max_tokens = settings.max_tokens if number else WARM_UP_TOKENS
            found = opened[mode].run(drawn[number], max_tokens)
            assert isinstance(found, ModeRun | NativeRun)
            check(found, sequences, settings.prompt_tokens, max_tokens)
            _progress(f"{sequences} at once, {f'round {number}' if number else 'warm-up'}", found)
            return found

        return in_turns(tuple(opened), settings.rounds, run)


def _progress(what: str, run: AnyRun) -> None:
    decode = "-" if run.decode_tps is None else f"{run.decode_tps:.1f}"
    text = f"{what}, {run.mode}: {decode} t/s decoding, {run.whole_tps:.1f} in all"
    if not isinstance(run, NativeRun):
        text += (
            f"; {run.steps} steps in {run.wall_s:.2f} s, {run.cpu_s / run.wall_s:.2f} cores; per "
            f"step {run.sleeps / run.steps:.1f} sleeps, {run.preemptions / run.steps:.1f} preemptions"
        )
    print(text, file=sys.stderr, flush=True)


def parse_args(argv: Sequence[str] | None) -> tuple[Settings, Path | None, Path | None]:
    """The settings, and where the JSON and the plot go."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument(
        "--modes",
        type=list_of(choice(*MODES)),
        default=(BARE, BATCHED),
        help="what is compared, by the names above",
    )
    add_load_arguments(parser)
    parser.add_argument(
        "--batched-bench",
        type=Path,
        default=None,
        help="the path of llama.cpp's llama-batched-bench",
    )
    parser.add_argument("--json", type=Path, default=None, help="a file for every run")
    parser.add_argument("--plot", type=Path, default=None, help="an SVG file for a plot")
    args = vars(parser.parse_args(argv))
    json_file, plot_file = args.pop("json"), args.pop("plot")
    return Settings(**args), json_file, plot_file


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the files."""
    settings, json_file, plot_file = parse_args(argv)
    facts = settings.facts()
    prompts = Prompts(text_tokens(settings.model))
    results = [summary(n, measure(n, settings, prompts)) for n in settings.sequences]
    print(table(facts, results))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")
    if plot_file is not None:
        plot_file.write_text(plot(facts, results))


if __name__ == "__main__":
    main()
