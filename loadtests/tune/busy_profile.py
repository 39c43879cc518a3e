"""Shows what a profile is worth that was made beside a load, at the first requests and after a rest.

    python -m loadtests.tune.busy_profile --model PATH [--loops 2] [--rest 30] [--threads N]

An engine starts beside busy loops, which then end. Another one starts on the quiet machine. Each gets
requests of 160 tokens after pauses of 2.6 s, and rests. A Markdown table goes to stdout: times of first
tokens, and of some batches as they are known at the start and after the rest. The machine should have
nothing else to do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.measure.benchmark import bounded, machine, machine_line, table, usable_cores
from serve_app.measure.process import all_arrivals

_N_PROMPT, _N_ANSWER, _N_REQUESTS, _PAUSE_S = 160, 24, 6, 2.6
_LIMIT_S = 120.0
"""The longest that an answer may take."""
_LOOP = "while True: pass"


StepTimes = Mapping[str, Mapping[int, float]]


class Outcome(NamedTuple):
    """The first tokens of an engine, and its costs in milliseconds at the start and at the end."""

    first_s: list[float]
    begun: StepTimes
    learned: StepTimes


def main() -> None:
    """Measure, and print the table."""
    args = _arguments()
    outcomes = {
        "beside a load": _measured(args, args.loops),
        "on a quiet machine": _measured(args, 0),
    }
    print(f"{machine_line(machine(args.model, args.threads))}\n")
    print(report(outcomes))


def _measured(args: argparse.Namespace, n_loops: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        options = EngineOptions(
            n_slots=16,
            n_ctx_slot=1024,
            threads=args.threads,
            kv_unified=False,
            flash_attn=True,
            profile_folder=Path(folder),
        )
        loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(n_loops)]
        try:
            engine = Engine.load(args.model, options)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        try:
            begun = engine.stats().costs.step_time
            first_s = []
            for i in range(_N_REQUESTS):
                first_s.append(_first_token_s(engine, str(i)))
                time.sleep(_PAUSE_S)
            time.sleep(args.rest)
            return Outcome(first_s, begun, engine.stats().costs.step_time)
        finally:
            engine.close()


def _first_token_s(engine: Engine, name: str) -> float:
    prompt = tuple(random.Random(name).sample(range(1000, 30_000), _N_PROMPT))
    sampling = SamplingParams(max_tokens=_N_ANSWER, ignore_eos=True)
    began = time.perf_counter()
    ((first, *_),) = all_arrivals(engine, [GenerationRequest(name, prompt, sampling)], _LIMIT_S)
    return first - began


def report(outcomes: dict[str, Outcome]) -> str:
    """A Markdown table with a row for each engine and profile."""
    columns = "profile made|first token, first / median (s)|1, 16 rows decoded (ms)|prompts of 16, 64 (ms)"
    rows = []
    for name, outcome in outcomes.items():
        first_s = f"{outcome.first_s[0]:.3f} / {statistics.median(outcome.first_s):.3f}"
        for state, times in (("", outcome.begun), (", after the rest", outcome.learned)):
            decode = ", ".join(f"{times['decode_ms'][n]:.1f}" for n in (1, 16))
            prompts = ", ".join(f"{times['prefill_ms'][n]:.1f}" for n in (16, 64))
            rows.append([name + state, "" if state else first_s, decode, prompts])
    return table(columns.split("|"), rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What a profile is worth that was made beside a load."
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--loops", type=bounded(1, 64), default=2, help="busy loops beside the start"
    )
    parser.add_argument(
        "--rest", type=bounded(0, 600), default=30, help="seconds of rest at the end"
    )
    parser.add_argument("--threads", type=bounded(1, 1024), default=usable_cores())
    return parser.parse_args()


if __name__ == "__main__":
    main()
