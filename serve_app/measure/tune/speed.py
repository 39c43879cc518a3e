"""How fast variants are: each in a process of its own, in turns, so that a noisy machine is fair."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from serve_app.measure.benchmark import Prompt
from serve_app.measure.process import MeasuredRun, RunnerProcess, engine_runner
from serve_app.measure.rounds import in_turns, of_each
from serve_app.measure.tune.variants import Variant

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TuneLoad:
    """The load for every variant."""

    sequences: tuple[int, ...]
    """How many run at once, one number after the other."""
    prompt_tokens: int
    """Tokens of each prompt."""
    max_tokens: int
    """Tokens that each generates, no fewer."""
    rounds: int
    threads: int
    """Where a variant does not say."""

    @property
    def n_ctx_slot(self) -> int:
        """The tokens that a slot holds."""
        return self.prompt_tokens + self.max_tokens + 1

    def visits(self, n_variants: int) -> int:
        """How often some variant is measured."""
        return n_variants * self.rounds


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """Medians of all rounds."""

    prefill_tps: float
    """Prompt tokens a second, with the most sequences."""
    decode_tps: Mapping[int, float]
    """Generated tokens a second while all decode, by the number of sequences."""
    whole_s: Mapping[int, tuple[float, ...]]
    """Seconds of the whole load in each round, by the number of sequences."""
    peak_bytes: int

    def seconds(self, n: int) -> float:
        """The median time of the whole load with so many sequences."""
        return statistics.median(self.whole_s[n])

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prefill_tps": self.prefill_tps,
            "decode_tps": dict(self.decode_tps),
            "whole_s": {n: list(times) for n, times in self.whole_s.items()},
            "peak_mib": self.peak_bytes / 2**20,
        }


def measure(
    variants: Sequence[Variant],
    load: TuneLoad,
    draw: Callable[[int], Prompt],
    on_visit: Callable[[str], None],
) -> dict[Variant, MeasuredSpeed]:
    """The speed of each. `draw` gives a new prompt of so many tokens; `on_visit` is told after each
    visit whose turn it was. Raises BenchmarkError when one cannot be served."""

    opener = partial(engine_runner, "llama.cpp")

    def visit(_number: int, variant: Variant) -> dict[int, MeasuredRun]:
        options = variant.options(max(load.sequences), load.n_ctx_slot, load.threads)
        with RunnerProcess(variant.name, opener, variant.path, options) as process:
            process.run([draw(load.prompt_tokens)], _WARM_UP_TOKENS)
            found = {
                n: process.run([draw(load.prompt_tokens) for _ in range(n)], load.max_tokens)
                for n in load.sequences
            }
        on_visit(variant.name)
        return found

    rounds = in_turns(variants, load.rounds, visit, warm_up=False)
    return {variant: _speed(runs, load) for variant, runs in of_each(rounds)}


def _speed(visits: Sequence[Mapping[int, MeasuredRun]], load: TuneLoad) -> MeasuredSpeed:
    most = max(load.sequences)
    return MeasuredSpeed(
        prefill_tps=statistics.median(visit[most].prefill_tps for visit in visits),
        decode_tps={
            n: statistics.median(visit[n].decode_tps or 0.0 for visit in visits)
            for n in load.sequences
        },
        whole_s={n: tuple(visit[n].wall_s for visit in visits) for n in load.sequences},
        peak_bytes=max(run.peak_bytes for visit in visits for run in visit.values()),
    )
