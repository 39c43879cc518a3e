"""Measures how well the cost model forecasts batches, at all depths, and while the machine gets slower.

    python -m loadtests.engine.forecast --model PATH [--depth 8192] [--batches 120] [--threads N]
        [--slots 4] [--flash-attn auto|on|off] [--load]

A profile is made as at an engine's start. Then batches of random sizes are run at random depths: one token
of each of some sequences, or a chunk of one prompt. Each is forecast, timed and learnt from, as in engines;
the same one right after it shows how far the machine differs from itself. Then as many batches follow
with half of the threads, which nobody tells the cost model: a machine whose speed halves from one batch
to the next. With --load, as many again follow while a process for each core computes besides, which takes
about half of the machine and makes it uneven. Depths are restored and not computed: sequences attend to
the same cells of a unified cache.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtests.common.benchmark import SEED, percentile, table, usable_cores
from serve_app.engine import EngineOptions
from serve_app.engine.autotune.cost_model import CostModel
from serve_app.engine.backends.base import Row
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.llama.context import Context, ContextOptions
from serve_app.llama.model import Model
from serve_app.llama.threads import Threads

_SWITCH = {"auto": None, "on": True, "off": False}
_BANDS = (0, 1024, 2048, 4096, 8192)
_STEPS = (0, 10, 20, 30, 60)
_CHUNKS = (8, 16, 24, 32, 48, 64)
_STATE = 64
"""Tokens of the state that depths are made of."""
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
_VISIT = 4
"""Batches at each depth."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One that was run."""

    depth: int
    forecast_s: float
    before_s: float
    """The forecast by the measurements from before the machine got slower."""
    seconds: float
    again_s: float
    """The time of the same batch right after that: no forecast can be better."""

    @property
    def noise(self) -> float:
        """Between the two."""
        return abs(self.again_s / self.seconds - 1)

    @property
    def error(self) -> float:
        """Of the forecast, as a part of what it took."""
        return abs(self.forecast_s / self.seconds - 1)


class Machine:
    """Runs batches of any depth in a unified cache."""

    def __init__(
        self, model: Path, n_slots: int, depth: int, threads: int, flash_attn: bool
    ) -> None:
        room = max(_CHUNKS) + n_slots
        self._n_slots = n_slots
        self._context = Context(
            Model(model),
            ContextOptions(
                n_seq_max=n_slots + 1,
                n_ctx_slot=depth + room,
                n_ctx=depth + _STATE + room,
                n_batch=room,
                threads=threads,
                flash_attn=flash_attn,
                kv_unified=True,
            ),
        )
        self._context.warm_up()
        self._context.decode([(5, i, n_slots, i == _STATE - 1) for i in range(_STATE)])
        self._state = self._context.save(n_slots)
        self._begin = 0

    def go_to(self, depth: int) -> int:
        """Have all sequences attend to about so many cells; returns how many."""
        for seq_id in range(self._n_slots + 1):
            self._context.truncate(seq_id, 0)
        n_times = depth // _STATE
        for _ in range(n_times):
            self._context.restore(self._n_slots, self._state)
            self._context.append(self._n_slots, 0)
        self._context.truncate(self._n_slots, 0)
        for seq_id in range(1, self._n_slots if n_times else 0):
            self._context.copy(0, seq_id)
        self._begin = _STATE if n_times else 0
        return n_times * _STATE

    def use_threads(self, n: int) -> None:
        """From now on."""
        self._context.use_threads(Threads.alike(n, None))

    def decode(self, n: int) -> float:
        """Seconds of a token of each of `n` sequences."""
        return self._run([(5, self._begin, seq_id, True) for seq_id in range(n)])

    def prefill(self, n: int) -> float:
        """Seconds of `n` rows of a prompt."""
        return self._run([(5, self._begin + i, 0, i == n - 1) for i in range(n)])

    def _run(self, rows: Sequence[Row]) -> float:
        began = time.perf_counter()
        self._context.decode(rows)
        seconds = time.perf_counter() - began
        for seq_id in {row[2] for row in rows}:
            self._context.truncate(seq_id, self._begin)
        return seconds


def run(
    machine: Machine, costs: CostModel, settings: argparse.Namespace, seed: int
) -> Iterator[Batch]:
    """Batches of random sizes and depths, from which the model learns."""
    rng, before = random.Random(seed), copy.deepcopy(costs)
    for _ in range(settings.batches // _VISIT):
        depth = machine.go_to(rng.randrange(settings.depth))
        for _ in range(_VISIT):
            decodes = rng.random() < 0.5
            n = rng.randint(1, settings.slots) if decodes else rng.choice(_CHUNKS)
            forecast_s = costs.decode_s(n, depth) if decodes else costs.prefill_s(n, depth)
            before_s = before.decode_s(n, depth) if decodes else before.prefill_s(n, depth)
            run_one = machine.decode if decodes else machine.prefill
            seconds, again_s = run_one(n), run_one(n)
            if decodes:
                costs.observe_decode(n, n, depth, seconds)
            else:
                costs.observe_prefill(n, depth, seconds)
            yield Batch(depth, forecast_s, before_s, seconds, again_s)


@contextmanager
def busy(n: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that compute meanwhile; they end with this one, whatever ends it."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(n)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _row(name: str, batches: Sequence[Batch]) -> tuple[str, ...]:
    errors = [100 * batch.error for batch in batches]
    noise = [100 * batch.noise for batch in batches]
    slower = statistics.median(batch.seconds / batch.before_s for batch in batches)
    parts = (percentile(found, percent) for found in (errors, noise) for percent in (50, 95))
    return (name, str(len(batches)), *(f"{part:.0f}%" for part in parts), f"{slower:.2f}")


def by_depth(batches: Sequence[Batch]) -> list[tuple[str, ...]]:
    """A row of the table for each band of depths, and one for all."""
    bands = zip(_BANDS, (*_BANDS[1:], sys.maxsize), strict=True)
    found = {low: [one for one in batches if low <= one.depth < high] for low, high in bands}
    rows = [_row(f"depth from {low}", inside) for low, inside in found.items() if inside]
    return [*rows, _row("all", batches)]


def by_step(batches: Sequence[Batch]) -> list[tuple[str, ...]]:
    """A row for the first steps, and those that follow."""
    parts = zip(_STEPS, (*_STEPS[1:], len(batches)), strict=True)
    return [
        _row(f"from step {first}", batches[first:end]) for first, end in parts if batches[first:end]
    ]


def measure(settings: argparse.Namespace) -> None:
    """Run and print all."""
    options = EngineOptions(
        n_slots=settings.slots,
        n_ctx_slot=settings.depth + 512,
        threads=settings.threads,
        flash_attn=_SWITCH[settings.flash_attn],
        kv_unified=True,
    )
    began = time.perf_counter()
    backend = LlamaBackend(settings.model, options)
    print(f"Opened in {time.perf_counter() - began:.1f} s: {backend.setup.mode_reason}.")
    profile, flash_attn = backend.setup.profile, backend.setup.mode.flash_attn
    backend.close()
    costs = CostModel(profile)
    machine = Machine(settings.model, settings.slots, settings.depth, settings.threads, flash_attn)
    header = ("batches", "n", "error p50", "p95", "noise p50", "p95", "took / first forecast")
    print(table(header, by_depth(list(run(machine, costs, settings, SEED)))), flush=True)
    learned = copy.deepcopy(costs)
    machine.use_threads(max(1, settings.threads // 2))
    print(table(header, by_step(list(run(machine, costs, settings, SEED + 1)))), flush=True)
    if settings.load:
        machine.use_threads(settings.threads)
        with busy(usable_cores()):
            print(table(header, by_step(list(run(machine, learned, settings, SEED + 1)))))


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.engine.forecast", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=8192)
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--flash-attn", choices=_SWITCH, default="auto")
    parser.add_argument("--load", action="store_true")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
