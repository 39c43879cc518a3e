"""Texts are those of llama.cpp's own chains of samplers, on a real context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.errors import InvalidRequestError
from serve_app.base.sampling import LogitBias, SamplingParams
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.grammars.constraint import Constraint
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.sampler import SequenceSampler
from serve_app.kernels.llama.sampling import history
from serve_app.prompt.grammars import from_regex
from tests.doubles.whole_chain import WholeChain
from tools.random_models.model import SHAPES, write_random_gguf

N_VOCAB, N_CTX_SLOT = 40_000, 64
PARAMS = {
    "default": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "no top_k": SamplingParams(top_k=0),
    "top_k of all": SamplingParams(top_k=10**6, top_p=0.9),
    "typical": SamplingParams(typical_p=0.8),
    "penalties": SamplingParams(repeat_penalty=1.4, presence_penalty=0.5, repeat_last_n=-1),
    "banned": SamplingParams(logit_bias=LogitBias.of(dict.fromkeys(range(0, N_VOCAB, 3), -5.0))),
}
PROMPT = [5, 9, 300, 9]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    path = tmp_path_factory.mktemp("model") / "words.gguf"
    write_random_gguf(path, replace(SHAPES["tiny"], n_vocab=N_VOCAB), "q8_0")
    made = Context(
        Model(path),
        ContextOptions(
            n_seq_max=1,
            n_ctx_slot=N_CTX_SLOT,
            n_batch=16,
            n_outputs=16,
            threads=1,
            flash_attn=False,
        ),
    )
    yield made
    made.close()


def whole_chain(context: Context, params: SamplingParams) -> WholeChain:
    window = N_CTX_SLOT if params.repeat_last_n < 0 else params.repeat_last_n
    return WholeChain(context.model.n_vocab, params, PROMPT, window)


def decode(context: Context, tokens: Sequence[int], position: int) -> None:
    """Each token's logits are wanted, as where drafts are verified."""
    context.truncate(0, position)
    context.decode([(token, position + i, 0, True) for i, token in enumerate(tokens)])


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_same_text(context: Context, params: SamplingParams) -> None:
    params = replace(params, seed=11)
    sampler, whole = SequenceSampler(context, params, PROMPT), whole_chain(context, params)
    fed = PROMPT
    for position in range(0, N_CTX_SLOT - len(PROMPT), len(PROMPT)):
        decode(context, fed, position)
        rows = range(len(fed))
        expected = [
            llama_cpp.llama_sampler_sample(whole.pointer, context.pointer, row) for row in rows
        ]
        assert [sampler.sample(row).token for row in rows] == expected
        fed = expected
    sampler.close()
    whole.close()


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_same_text_of_a_grammar(context: Context, params: SamplingParams) -> None:
    """A random model hardly ever picks what the grammar allows, so the whole of it counts."""
    params = replace(params, seed=12)
    grammar = from_regex(r"[a-m ]{3}x(y|zz)[^a-z]+", "regex")
    constraint, other = (context.model.constraint(grammar) for _ in range(2))
    sampler = SequenceSampler(context, params, PROMPT, constraint)
    whole = whole_chain(context, params)
    fed = PROMPT[-1]
    for position in range(N_CTX_SLOT):
        decode(context, [fed], position)
        expected = pick_within(whole, other, context.logits(0))
        sampled = sampler.sample(0)
        assert sampled.token == expected
        fed = sampled.token
        if sampled.complete:
            break
    sampler.close()
    whole.close()


def pick_within(whole: WholeChain, constraint: Constraint, logits: NDArray[np.float32]) -> int:
    token = whole.draw(logits)
    if not constraint.take(token):
        token = whole.draw(np.where(constraint.token_mask(), logits, np.float32(-np.inf)))
        assert constraint.take(token)
    whole.accept(token)
    return token


def test_breakers_are_looked_for_once_and_samplers_share_nothing_else(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the sequences counts its own repeats, as with a sampler that was made for it alone."""
    scans: list[int] = []
    make = llama_cpp.llama_sampler_init_dry

    def noted(*arguments: Any) -> Any:
        scans.append(arguments[-1])
        return make(*arguments)

    monkeypatch.setattr(llama_cpp, "llama_sampler_init_dry", noted)
    breakers = ("\n", ".", "\n", "." + "x" * 1000)
    params = SamplingParams(
        temperature=0, dry_multiplier=100, dry_sequence_breakers=breakers, dry_penalty_last_n=32
    )
    repeated = [97, 98, 99, 100, 97, 98, 99]  # 100 would repeat four tokens
    decode(context, [5], 0)
    logits = context.logits(0)
    logits[100], logits[101] = 90, 80
    for prompt, token in ((repeated, 101), (repeated[:4], 100), (repeated, 101)):
        sampler = SequenceSampler(context, params, prompt)
        assert sampler.sample(0).token == token
        sampler.close()
    assert scans == [3]


def test_breakers_that_are_in_too_many_tokens_are_refused(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of their sampler would take long, on the decoder thread, for each sequence."""
    letters = tuple("etaoinsrhldcumfp")
    params = SamplingParams(dry_multiplier=1, dry_sequence_breakers=letters)
    with pytest.raises(InvalidRequestError, match="Use fewer or rarer strings"):
        context.model.history(params, N_CTX_SLOT, PROMPT)
    assert context.model.history(SamplingParams(dry_multiplier=1), N_CTX_SLOT, PROMPT)


def test_samplers_count_once_and_compare_few(context: Context) -> None:
    """Infill compares each candidate with each: all of a large vocabulary would take minutes. Typical sorts
    them by another order."""
    named = ("typ_p", "infill", "typ_p", "infill", "top_n_sigma")
    sampler = SequenceSampler(
        context, SamplingParams(samplers=named, typical_p=0.5, top_n_sigma=1), PROMPT
    )
    links = [
        llama_cpp.llama_sampler_chain_get(chain, i)
        for chain in (sampler._chain._first, sampler._chain._others)
        for i in range(llama_cpp.llama_sampler_chain_n(chain))
    ]
    names = [llama_cpp.llama_sampler_name(link).decode() for link in links]
    few = ["top-k"]
    assert names == [*few, "typical", *few, "infill", "top-n-sigma", "dist"]
    decode(context, [5], 0)
    assert 0 <= sampler.sample(0).token < N_VOCAB
    sampler.close()


def test_a_prompt_is_told_to_samplers_before_its_answers_begin(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tell samplers of 30,000 tokens takes 20 ms, and a request may have 32 answers, which the thread
    that decodes begins."""
    told: list[int] = []

    def accept(sampler: Any, token: int) -> None:
        told.append(token)
        llama_cpp.llama_sampler_accept(sampler, token)

    monkeypatch.setattr(history, "_accept", accept)
    params = SamplingParams(
        seed=3, repeat_penalty=1.3, repeat_last_n=-1, dry_multiplier=2, dry_penalty_last_n=-1
    )
    prompt = [token % 7 + 5 for token in range(40)]
    decode(context, [5, 6, 7], 0)
    shared = context.model.history(params, N_CTX_SLOT, prompt)
    assert told == prompt
    picked = []
    for _ in range(3):
        sampler = SequenceSampler(context, params, prompt)
        picked.append([sampler.sample(0).token for _ in range(4)])
        sampler.close()
    assert picked[1] == picked[2] == picked[0]
    assert told == prompt
    assert context.model.history(params, N_CTX_SLOT, prompt) is shared
    SequenceSampler(context, replace(params, repeat_penalty=1.4), prompt).close()
    assert told == 2 * prompt
