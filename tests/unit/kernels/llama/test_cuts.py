"""Tokens picked from a cut are those that llama.cpp's chain picks from the whole vocabulary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.sampling import LogitBias, SamplingParams
from serve_app.kernels.llama.sampler import SequenceSampler
from serve_app.kernels.llama.sampling import chain, cuts
from serve_app.kernels.llama.sampling.candidates import Candidates
from serve_app.kernels.llama.sampling.history import Histories
from tests.doubles.whole_chain import WholeChain

Logits = NDArray[np.float32]
N_LARGE, N_CTX_SLOT = 151_936, 100


def peaked(random: np.random.Generator, n: int) -> Logits:
    """A few tokens stand out of a wide bulk, as with trained models."""
    logits = random.standard_normal(n) * 2
    logits[random.integers(0, n, 40)] += random.uniform(4, 14, 40)
    return logits.astype(np.float32)


def steep(random: np.random.Generator, n: int) -> Logits:
    """Few tokens have nearly all of the probability."""
    logits = random.standard_normal(n)
    logits[random.integers(0, n, 5)] += (24, 24.5, 25, 26, 27)
    return logits.astype(np.float32)


def wide(random: np.random.Generator, n: int) -> Logits:
    return (random.standard_normal(n) * 3).astype(np.float32)


def flat(random: np.random.Generator, n: int) -> Logits:
    return (random.standard_normal(n) / 8).astype(np.float32)


def tied(random: np.random.Generator, n: int) -> Logits:
    """Many have the same logit, likely ones too."""
    return np.round(random.standard_normal(n) * 2, 1).astype(np.float32)


def tied_seconds(random: np.random.Generator, n: int) -> Logits:
    """Thirty have the second highest logit."""
    logits = wide(random, n)
    logits[random.integers(0, n, 30)] = 20
    logits[random.integers(n)] = 20.25
    return logits


def all_alike(_random: np.random.Generator, n: int) -> Logits:
    return np.ones(n, np.float32)


def masked(random: np.random.Generator, n: int) -> Logits:
    """All but a few are banned."""
    logits = wide(random, n)
    logits[random.random(n) > 20 / n] = -np.inf
    logits[random.integers(n)] = 2
    return logits


def crowded(random: np.random.Generator, n: int) -> Logits:
    """The likely ones are neighbours, and where numpy's parts end."""
    logits = wide(random, n)
    logits[-60:] = 12 + random.random(60)
    logits[:: max(1, n // 128)] += 6
    return logits


SHAPES = (peaked, steep, wide, flat, tied, tied_seconds, all_alike, masked, crowded)
PARAMS = {
    "default": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "top_k": SamplingParams(top_k=5, temperature=2),
    "top_k=1": SamplingParams(top_k=1),
    "top_k=2": SamplingParams(top_k=2, temperature=2),
    "large top_k": SamplingParams(top_k=1500, top_p=1, min_p=0, temperature=1),
    "top_k of all": SamplingParams(top_k=10**6, top_p=0.5),
    "typical": SamplingParams(typical_p=0.7, min_p=0, top_p=1),
    "no top_k": SamplingParams(top_k=0),
    "top_p": SamplingParams(top_k=0, min_p=0, temperature=1.5),
    "top_p near 1": SamplingParams(top_k=0, top_p=0.999, min_p=0.001),
    "top_p=0": SamplingParams(top_k=0, top_p=0),
    "min_p": SamplingParams(top_k=0, top_p=1, min_p=0.02, temperature=3),
    "min_p=1": SamplingParams(top_k=0, top_p=1, min_p=1),
    "min_p near 0": SamplingParams(top_k=0, top_p=1, min_p=1e-50, temperature=100),
    "top_p nearly 1": SamplingParams(top_k=0, top_p=1 - 1e-9, min_p=0.2, temperature=9),
    "hardly hot": SamplingParams(temperature=1e-50),
    "all": SamplingParams(top_k=0, top_p=1, min_p=0, temperature=1),
    "typical of all": SamplingParams(top_k=0, typical_p=0.9),
    "top_n_sigma": SamplingParams(top_n_sigma=1),
}
ADJUSTMENTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    "wide penalties": {"repeat_penalty": 0.8, "repeat_last_n": -1},
    "bias": {"logit_bias": LogitBias.of({token: 8 - token for token in range(0, 100, 7)})},
    "bias of all": {"logit_bias": LogitBias.of({token: token % 5 - 2 for token in range(300)})},
    "bans": {"logit_bias": LogitBias.of(dict.fromkeys(range(0, 300, 2), -math.inf))},
}


@dataclass
class Row:
    """A context with one row of logits."""

    n: int
    eog_tokens: tuple[int, ...] = ()
    values: Logits = field(default_factory=lambda: np.empty(0, np.float32))
    told: tuple[Logits, Logits] | None = None
    """All logits, and those that the sampler got instead."""

    @property
    def context(self) -> Any:
        history = Histories(None, self.n, list).history
        model = SimpleNamespace(n_vocab=self.n, eog_tokens=self.eog_tokens, history=history)
        return SimpleNamespace(
            n_ctx_slot=N_CTX_SLOT, model=model, logits=self.logits, pick=self.pick
        )

    def logits(self, _row: int, n_highest: int | None = None) -> Logits:
        """No more than the sampler needs."""
        highest = None if n_highest is None else cuts.highest_distinct(self.values, n_highest)
        if highest is None:
            return self.values
        if self.told is None or self.told[0] is not self.values:
            told = np.full(self.n, -np.inf, np.float32)
            told[highest[0]] = highest[1]
            self.told = self.values, told
        return self.told[1]

    def pick(self, sampler: Any, _row: int) -> int:
        """As llama.cpp does it with the logits of its context."""
        candidates = Candidates(np.arange(self.n), self.values)
        candidates.apply(sampler)
        return candidates.picked_token


def prompt(random: np.random.Generator, n: int) -> list[int]:
    return [int(token) for token in random.integers(0, min(n, 400), 150)]


def picked(params: SamplingParams, n: int, seed: int, shapes: tuple[Any, ...]) -> Iterator[Any]:
    """For each shape of logits, the token that is picked from a cut, and the two that llama.cpp's chain
    picks from all, in the order of ids and of logits: they differ where rounding decides. The samplers have
    the same seed, and went through the shapes before."""
    random = np.random.default_rng(seed)
    row, given = Row(n), prompt(random, n)
    params = replace(params, seed=seed)
    window = N_CTX_SLOT if params.repeat_last_n < 0 else params.repeat_last_n
    sampler = SequenceSampler(row.context, params, given)
    chains = [WholeChain(n, params, given, window, ordered=ordered) for ordered in (False, True)]
    for shape in shapes:
        row.values = shape(random, n)
        before = row.values.copy()
        token = sampler.sample(0).token
        yield shape.__name__, token, {whole.draw(before) for whole in chains}
        for whole in chains:
            whole.accept(token)
        assert np.array_equal(row.values, before), "the logits are as they were"
    sampler.close()
    for whole in chains:
        whole.close()


@pytest.mark.parametrize("adjusted", ADJUSTMENTS.values(), ids=ADJUSTMENTS)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_same_tokens_as_from_the_whole_vocabulary(
    params: SamplingParams, adjusted: dict[str, Any]
) -> None:
    params = replace(params, **adjusted)
    for n, seed in ((300, 0), (300, 1), (300, 2), (30_011, 0)):
        for shape, token, expected in picked(params, n, seed, SHAPES):
            assert token in expected, (shape, n, seed)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_same_tokens_of_a_large_vocabulary(params: SamplingParams) -> None:
    for shape, token, expected in picked(params, N_LARGE, 1, SHAPES):
        assert token in expected, shape


CUT = {
    "default": peaked,
    "greedy": tied,
    "large top_k": wide,
    "typical": wide,
    "no top_k": wide,
    "top_p": steep,
    "min_p": wide,
}
"""Parameters, and logits of which few are left to llama.cpp."""


@pytest.mark.parametrize("name", CUT)
def test_llama_cpp_sees_only_what_it_may_pick(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Seen(Candidates):
        def __init__(self, tokens: Any, logits: Any, **more: Any) -> None:
            seen.append(tokens.size)
            super().__init__(tokens, logits, **more)

    monkeypatch.setattr(chain, "Candidates", Seen)
    list(picked(PARAMS[name], N_LARGE, 3, (CUT[name],)))
    assert len(seen) == (name != "greedy")  # whose token is known without llama.cpp
    assert sum(seen) < 10_000


SORTING = {
    "xtc": SamplingParams(top_k=0, xtc_probability=1),
    "dynatemp": SamplingParams(top_k=0, dynatemp_range=1),
    "mirostat": SamplingParams(mirostat=2),
    "min_keep": SamplingParams(top_k=0, min_keep=10**6),
    "typical": SamplingParams(top_k=0, typical_p=0.9),
    "top_k of most": SamplingParams(top_k=10**5, top_p=1, min_p=0),
    "greedy of typical": SamplingParams(top_k=0, typical_p=0.9, temperature=0),
}
"""Parameters with which llama.cpp would sort the whole vocabulary, which takes ten milliseconds."""


@pytest.mark.parametrize("name", SORTING)
def test_llama_cpp_need_not_sort_a_vocabulary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Seen(Candidates):
        def __init__(self, tokens: Any, logits: Any, **more: Any) -> None:
            seen.append(more.get("ordered", False))
            super().__init__(tokens, logits, **more)

    monkeypatch.setattr(chain, "Candidates", Seen)
    row = Row(N_LARGE)
    row.values = wide(np.random.default_rng(3), N_LARGE)
    sampler = SequenceSampler(row.context, replace(SORTING[name], seed=7), ())
    assert 0 <= sampler.sample(0).token < N_LARGE
    sampler.close()
    assert seen == [True]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("n", [40, 5000, 16_384, 30_000])
def test_the_highest_are_those_of_a_sort(shape: Callable[..., Logits], n: int) -> None:
    logits = shape(np.random.default_rng(2), N_LARGE)
    highest = cuts.highest(logits, n)
    assert highest is not None
    tokens, found = highest
    n_allowed = int((logits > -np.inf).sum())
    assert found.tolist() == np.sort(logits)[::-1][: min(n, n_allowed)].tolist()
    assert np.array_equal(logits[tokens], found)
    assert np.unique(tokens).size == tokens.size


@pytest.mark.parametrize("params", [{}, {"top_k": 0, "top_p": 1, "min_p": 0}], ids=["few", "all"])
def test_the_probabilities_that_a_token_was_drawn_with(params: dict[str, Any]) -> None:
    row = Row(N_LARGE)
    row.values = peaked(np.random.default_rng(5), N_LARGE)
    asked = SamplingParams(seed=3, temperature=1, logprobs=4, post_sampling_probs=True, **params)
    sampler = SequenceSampler(row.context, asked, ())
    sampled = sampler.sample(0)
    sampler.close()
    assert sampled.logprobs is not None
    top = sampled.logprobs.top
    assert [token for token, _ in top] == np.argsort(-row.values)[:4].tolist()
    if params:
        total = math.log(np.exp(row.values.astype(np.float64)).sum())
        assert top[0][1] == pytest.approx(row.values.max() - total, abs=1e-4)
    assert sampled.logprobs.logprob <= top[0][1] <= 0


@pytest.mark.parametrize(
    "cut", [cuts.greedy, lambda x: cuts.top_k(x, 40), lambda x: cuts.min_p(x, 0.1)]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_not_cut(
    cut: Callable[[Logits], cuts.Cut | None], value: float
) -> None:
    logits = np.zeros(N_LARGE, np.float32)
    logits[77] = value
    assert cut(logits) is None
    assert cuts.top_p(logits, 0.9, 0.05) is None


def test_where_rounding_decides_nothing_is_cut() -> None:
    """Sixteen tokens have a sixteenth each: eight of them are half, but for rounding."""
    logits = np.full(N_LARGE, -20, np.float32)
    logits[:16] = np.arange(16) * np.float32(1e-7)
    assert cuts.top_p(logits, 0.5, 0) is None
    assert cuts.top_p(logits, 0.53, 0) is not None


def test_a_ban_holds_whatever_else_is_added() -> None:
    row = Row(N_LARGE, eog_tokens=(5,))
    row.values = np.zeros(N_LARGE, np.float32)
    row.values[5], row.values[6] = 30, 10
    bias = LogitBias.of({5: 50.0})
    banned = SamplingParams(ignore_eos=True, logit_bias=bias, temperature=0)
    assert SequenceSampler(row.context, banned, ()).sample(0).token == 6
    assert SequenceSampler(row.context, replace(banned, ignore_eos=False), ()).sample(0).token == 5


def test_a_bias_of_a_whole_vocabulary_is_ready_at_once() -> None:
    """To look at each of its entries took a tenth of a second of the thread that all streams wait for."""
    row, took = Row(N_LARGE), list[float]()
    params = SamplingParams(logit_bias=LogitBias.of(dict.fromkeys(range(N_LARGE), 1.0)))
    for _ in range(3):
        began = time.thread_time()
        SequenceSampler(row.context, params, ()).close()
        took.append(time.thread_time() - began)
    assert min(took) < 0.01
