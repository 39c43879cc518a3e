"""The sampler chain on logits that are known, without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.sampling import CHAIN, PARAMETERS, LogitBias, SamplingParams
from serve_app.kernels.llama.sampler import SequenceSampler
from serve_app.kernels.llama.sampling.candidates import Candidates
from serve_app.kernels.llama.sampling.history import Histories

LOGITS = np.array([4.0, 3.5, 2.0, 1.0, 0.5, 0.0, -1.0, -6.0], np.float32)
"""By token: the likelier ones first."""
SHARES = np.exp(LOGITS) / np.exp(LOGITS).sum()
ALL = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
"""Draws from the model's own distribution."""


@dataclass
class Everything:
    """A constraint that allows all: with one, the chain gets the logits that the context says it has."""

    complete: bool = False
    fault: str | None = None

    def take(self, _token: int) -> bool:
        return True


def sampler(params: SamplingParams, logits: NDArray[np.float32] = LOGITS) -> SequenceSampler:
    def pick(chain: Any, _row: int) -> int:
        candidates = Candidates(np.arange(len(logits)), logits)
        candidates.apply(chain)
        return candidates.picked_token

    context: Any = SimpleNamespace(
        n_ctx_slot=16,
        model=SimpleNamespace(
            n_vocab=len(logits), eog_tokens=(), history=Histories(None, len(logits), list).history
        ),
        logits=lambda _row, _n=None: logits,
        pick=pick,
    )
    allowed: Any = Everything()
    return SequenceSampler(context, params, (), allowed)


def drawn(params: SamplingParams, logits: NDArray[np.float32] = LOGITS) -> set[int]:
    """The tokens that many seeds give."""
    found = set()
    for seed in range(300):
        one = sampler(replace(params, seed=seed), logits)
        found.add(one.sample(0).token)
        one.close()
    return found


def flat(params: SamplingParams) -> SamplingParams:
    """So hot that whatever is kept is drawn soon: the temperature comes last."""
    return replace(params, temperature=100)


KEPT = {
    "nothing": (ALL, {*range(8)}),
    "top_n_sigma": (
        replace(ALL, top_n_sigma=0.9),
        {*np.flatnonzero(4 - 0.9 * LOGITS.std() <= LOGITS)},
    ),
    "top_k": (replace(ALL, top_k=3), {0, 1, 2}),
    "top_p": (replace(ALL, top_p=float(SHARES[:2].sum()) + 0.01), {0, 1, 2}),
    "min_p": (replace(ALL, min_p=math.exp(-2.25)), {0, 1, 2}),
    "temperature last": (replace(ALL, top_k=3, samplers=("top_k", "temperature")), {0, 1, 2}),
    "not used": (replace(ALL, top_k=3, samplers=("temperature",)), {*range(8)}),
    "top_k, min_keep": (replace(ALL, top_k=0, min_p=1, min_keep=3), {0, 1, 2}),
    "xtc": (replace(ALL, xtc_probability=1, xtc_threshold=0.2), {*range(1, 8)}),
    "logit_bias": (
        replace(ALL, logit_bias=LogitBias.of({0: -math.inf, 7: -math.inf})),
        {*range(1, 7)},
    ),
}
"""By the parameter that is set: what it leaves."""


@pytest.mark.parametrize(("params", "expected"), KEPT.values(), ids=KEPT)
def test_what_is_kept_is_drawn_and_nothing_else(params: SamplingParams, expected: set[int]) -> None:
    assert drawn(flat(params)) == expected


def test_temperature_zero_picks_the_most_likely() -> None:
    assert drawn(replace(ALL, temperature=0)) == {0}


def names(chain: Any) -> list[str]:
    """Of the samplers in one of llama.cpp's chains."""
    count = llama_cpp.llama_sampler_chain_n(chain)
    links = (llama_cpp.llama_sampler_chain_get(chain, i) for i in range(count))
    return [llama_cpp.llama_sampler_name(link).decode().replace("-", "_") for link in links]


def test_the_chain_has_the_samplers_in_the_declared_order() -> None:
    reached: dict[str, Any] = {
        one.name: 0.25
        for one in PARAMETERS
        if one.sampler and one.type is float and one.sampler != "dry"  # needs a vocabulary
    }
    declared = {"typical": "typ_p", "temp": "temperature", "temp_ext": "temperature"}
    one = sampler(SamplingParams(**reached))
    chain = one._chain
    found = ["penalties", "dry", *names(chain._first), *names(chain._others)]
    one.close()
    assert [declared.get(name, name) for name in found] == [*CHAIN, "dist"]
