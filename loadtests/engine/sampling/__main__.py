"""Measures the time that picking tokens takes in a step, beside decoding.

    python -m loadtests.engine.sampling --model PATH [--sequences 1,16,32] [--rounds 5]

For each kind of parameters, a token of each of so many sequences is picked by Corral's samplers, and by
llama.cpp's own chains over the whole vocabulary, in turns. The logits are those of one batch of the
model's. A grammar is Corral's either way; log probabilities are only told by Corral.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np

from loadtests.common.benchmark import (
    bounded,
    listed,
    machine,
    machine_line,
    table,
    usable_cores,
)
from loadtests.common.rounds import in_turns, of_each, ratio_spread
from loadtests.engine.sampling.whole_chain import WholeChain
from serve_app.llama.context import Context, ContextOptions
from serve_app.llama.grammars.constraint import Constraint
from serve_app.llama.model import Model
from serve_app.llama.sampler import SequenceSampler
from serve_app.prompt.grammars import from_json_schema
from serve_app.sampling import SamplingParams

WHOLE, CORRAL = "llama.cpp's chains", "Corral"
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
}
KINDS = {
    "default": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "`top_k: 0`": SamplingParams(top_k=0),
    "`typical_p: 0.9`": SamplingParams(typical_p=0.9),
    "`typical_p: 0.9`, `top_k: 0`": SamplingParams(typical_p=0.9, top_k=0),
    "`top_n_sigma: 1`": SamplingParams(top_n_sigma=1),
    "penalties on 256 tokens": SamplingParams(repeat_penalty=1.1, repeat_last_n=-1),
    "`logprobs: 5`": SamplingParams(logprobs=5),
    "grammar": SamplingParams(grammar=from_json_schema(_SCHEMA, "schema")),
}
_N_CTX_SLOT = 256
# Steps of which one measurement takes the median.
_STEPS = 7

Pick = Callable[[int], object]
"""Picks a token by the logits of that row."""


class Bench:
    """A context that has decoded a batch of as many sequences as there may be."""

    def __init__(self, model: Path, n_most: int) -> None:
        self._model = Model(model)
        self._context = Context(
            self._model,
            ContextOptions(
                n_seq_max=n_most,
                n_ctx_slot=_N_CTX_SLOT,
                n_batch=n_most,
                threads=usable_cores(),
                flash_attn=False,
            ),
        )
        random = np.random.default_rng(0)
        tokens = [int(token) for token in random.integers(0, self._model.n_vocab, _N_CTX_SLOT)]
        self._prompt = tokens
        self._context.decode([(tokens[i], 0, i, True) for i in range(n_most)])

    def run(self, kind: SamplingParams, n: int, n_rounds: int) -> list[dict[str, float]]:
        """Milliseconds of a step of n sequences in each round."""
        return in_turns((WHOLE, CORRAL), n_rounds, lambda _, way: self._step_ms(way, kind, n))

    def _step_ms(self, way: str, kind: SamplingParams, n: int) -> float:
        opened = [self._open(way, replace(kind, seed=seed)) for seed in range(n)]
        picks = [pick for pick, _ in opened]
        _step_s(picks)  # llama.cpp takes its memory then
        took_s = [_step_s(picks) for _ in range(_STEPS)]
        for _pick, close in opened:
            close()
        return 1000 * statistics.median(took_s)

    def _open(self, way: str, params: SamplingParams) -> tuple[Pick, Callable[[], None]]:
        constraint = None if params.grammar is None else self._model.constraint(params.grammar)
        if way == CORRAL:
            sampler = SequenceSampler(self._context, params, self._prompt, constraint)
            return sampler.sample, sampler.close
        window = _N_CTX_SLOT if params.repeat_last_n < 0 else params.repeat_last_n
        chain = WholeChain(self._model.n_vocab, params, self._prompt, window)
        if constraint is None:
            pointer = self._context.pointer
            return lambda row: llama_cpp.llama_sampler_sample(
                chain.pointer, pointer, row
            ), chain.close
        return lambda row: self._pick_within(constraint, chain, row), chain.close

    def _pick_within(self, constraint: Constraint, chain: WholeChain, row: int) -> None:
        logits = self._context.logits(row)
        if not constraint.take(chain.draw(logits)):
            allowed = np.where(constraint.allowed(), logits, np.float32(-np.inf))
            constraint.take(chain.draw(allowed))

    def close(self) -> None:
        """Free the context."""
        self._context.close()


def _step_s(picks: Sequence[Pick]) -> float:
    """Seconds that a token of each takes."""
    began = time.perf_counter()
    for row, pick in enumerate(picks):
        pick(row)
    return time.perf_counter() - began


def _line(name: str, n: int, rounds: Sequence[dict[str, float]]) -> tuple[object, ...]:
    by_way = dict(of_each(rounds))
    medians = [f"{statistics.median(by_way[way]):.2f}" for way in (WHOLE, CORRAL)]
    return name, n, *medians, ratio_spread(by_way[CORRAL], by_way[WHOLE])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.engine.sampling", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sequences", type=listed(bounded(1, 64)), default=(1, 16, 32))
    parser.add_argument("--rounds", type=bounded(1, 100), default=5)
    settings = parser.parse_args()
    bench = Bench(settings.model, max(settings.sequences))
    lines = [
        _line(name, n, bench.run(kind, n, settings.rounds))
        for name, kind in KINDS.items()
        for n in settings.sequences
    ]
    bench.close()
    print(machine_line(machine(settings.model, usable_cores())))
    print(table(("kind", "sequences", f"{WHOLE}, ms", f"{CORRAL}, ms", "ratio"), lines))


if __name__ == "__main__":
    main()
