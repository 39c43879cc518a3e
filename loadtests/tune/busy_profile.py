"""Shows what a profile is worth that was made beside a load, from the first request on and after a rest.

    python -m loadtests.tune.busy_profile --model PATH [--loops 2] [--rest 40] [--threads N]

An engine starts on the quiet machine, and another one beside busy loops, which then end. Both get
requests of 160 tokens after pauses of 2.6 s, in turns, and rest. The process of the other one is stopped
meanwhile (SIGSTOP). Two Markdown tables go to stdout: first tokens, and the times of batches as each
engine began with them and as it kept them on disk. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from serve_app.cli.measure import benchmark
from serve_app.cli.measure.process import all_arrivals, opened_object, start_process
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.choice.plan import Plan
from serve_app.engine.costs import profile_cache

_N_PROMPT, _N_ANSWER, _N_REQUESTS, _PAUSE_S = 160, 24, 8, 2.6
_LIMIT_S = 120.0
"""The longest that a start or an answer may take."""
_LOOP = "while True: pass"
_KINDS = {"decode_s": "sequences", "prefill_s": "rows of a prompt"}
_Result = TypeVar("_Result")
Times = Mapping[str, Mapping[int, float]]
"""Seconds of batches by their number of rows, by kind of batch."""


class EngineProcess:
    """An engine in a process of its own, which is stopped except while it works or rests."""

    def __init__(self, args: argparse.Namespace, folder: Path, n_loops: int) -> None:
        self._folder = folder
        options = EngineOptions(
            n_slots=16,
            n_ctx_slot=1024,
            threads=args.threads,
            kv_unified=False,
            flash_attn=True,
            profile_folder=folder,
        )
        loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(n_loops)]
        try:
            self._pool = start_process(Engine.load, args.model, options)
            self._pid = self._pool.submit(os.getpid).result(_LIMIT_S)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        self.begun = self.run(_times, 0)
        """The times that it began with."""

    def run(self, work: Callable[..., _Result], rest_s: float, *arguments: object) -> _Result:
        """Have this done, and let the engine rest for so long."""
        os.kill(self._pid, signal.SIGCONT)
        try:
            result = self._pool.submit(work, *arguments).result(_LIMIT_S)
            time.sleep(rest_s)
            return result
        finally:
            os.kill(self._pid, signal.SIGSTOP)

    def kept(self) -> Times | None:
        """The times on disk, with which the next start begins; None if there are none."""
        plans = (
            profile_cache.load(self._folder, path.stem, Plan)
            for path in self._folder.glob("*.json")
        )
        profiles = [cache.profile for plan in plans if plan for cache in plan.caches.values()]
        return {kind: getattr(profiles[0], kind) for kind in _KINDS} if profiles else None

    def close(self) -> None:
        """End the engine and its process."""
        os.kill(self._pid, signal.SIGCONT)
        self._pool.submit(_close).result(_LIMIT_S)
        self._pool.shutdown()


def _close() -> None:
    opened_object().close()


def _times() -> Times:
    step_ms = opened_object().stats().costs.step_time
    return {
        kind: {n: ms / 1000 for n, ms in step_ms[kind.replace("_s", "_ms")].items()}
        for kind in _KINDS
    }


def _first_token_s(name: str) -> float:
    prompt = tuple(random.Random(name).sample(range(1000, 30_000), _N_PROMPT))
    sampling = SamplingParams(max_tokens=_N_ANSWER, ignore_eos=True)
    began = time.perf_counter()
    ((first, *_),) = all_arrivals(
        opened_object(), [GenerationRequest(name, prompt, sampling)], _LIMIT_S
    )
    return first - began


def main() -> None:
    """Measure, and print the tables."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as good_folder, tempfile.TemporaryDirectory() as busy_folder:
        good = EngineProcess(args, Path(good_folder), 0)
        busy = EngineProcess(args, Path(busy_folder), args.loops)
        try:
            first_s: dict[EngineProcess, list[float]] = {good: [], busy: []}
            for i in range(_N_REQUESTS):
                for process in benchmark.turns([busy, good], i):
                    first_s[process].append(process.run(_first_token_s, _PAUSE_S, str(i)))
            for process in (good, busy):
                process.run(_times, args.rest)
            print(f"{benchmark.machine_line(benchmark.machine(args.model, args.threads))}\n")
            print(_first_tokens(first_s[busy], first_s[good]), end="\n\n")
            print(_batch_times(good, busy))
        finally:
            good.close()
            busy.close()


def _first_tokens(busy_s: list[float], good_s: list[float]) -> str:
    """A Markdown table of the first tokens, with the ratio of each pair."""
    ratios = [busy / good for busy, good in zip(busy_s, good_s, strict=True)]
    rows = [
        (name, *(f"{value:.2f}" for value in values), f"{statistics.median(values):.2f}")
        for name, values in (
            ("made beside a load (s)", busy_s),
            ("made on a quiet machine (s)", good_s),
            ("ratio", ratios),
        )
    ]
    requests = (f"request {i + 1}" for i in range(_N_REQUESTS))
    return benchmark.table(["first token, profile", *requests, "median"], rows)


def _batch_times(good: EngineProcess, busy: EngineProcess) -> str:
    """A Markdown table of the times of batches, as a part of the good profile's."""
    truth = good.kept() or good.begun
    rows = []
    for kind, unit in _KINDS.items():
        states = {
            "good, at the start": good.begun,
            "beside a load, at the start": busy.begun,
            "beside a load, kept": busy.kept() or {kind: {}},
        }
        for name, times in states.items():
            ratios = {n: times[kind][n] / truth[kind][n] for n in truth[kind] if n in times[kind]}
            if not ratios:
                rows.append((f"{unit}: {name}", "none", "", ""))
                continue
            median = statistics.median(ratios.values())
            listed = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in ratios.items())
            farthest = max(ratios.values(), key=lambda ratio: max(ratio, 1 / ratio))
            rows.append((f"{unit}: {name}", f"{median:.2f}", f"{farthest:.2f}", listed))
    return benchmark.table(["times of", "median ratio", "farthest", "by number"], rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What a profile is worth that was made beside a load."
    )
    bounded = benchmark.number_between
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--loops", type=bounded(1, 64), default=2, help="busy loops beside the start"
    )
    parser.add_argument(
        "--rest", type=bounded(0, 600), default=40, help="seconds of rest at the end"
    )
    parser.add_argument("--threads", type=bounded(1, 1024), default=benchmark.usable_cores())
    return parser.parse_args()


if __name__ == "__main__":
    main()
