"""Log probabilities of prompts, beside llama.cpp's own logits.

With F32 weights these depend least on which cells of the cache, and which rows of a batch, a token has. The
references compute with one thread: OpenMP would keep another team for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenDelta
from tests.integration.reference import reference
from tools.random_models.model import SHAPES, write_random_gguf

TEXTS = [
    "One.",
    "The capital of Portugal is Lisbon, and the capital of Italy is Rome. " * 5,
    "Once upon a time, there was a brave fox who lived in the forest.",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "float.gguf"
    write_random_gguf(made, SHAPES["tiny"], "f32")
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["split", "unified"])
def engine(path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = EngineOptions(
        n_slots=3,
        n_ctx_slot=512,
        threads=1,
        n_batch=64,
        flash_attn=False,
        kv_unified=request.param,
        profile_limit_s=0,
    )
    made = Engine.load(path, options)
    yield made
    made.close(0)


def reference_logprobs(path: Path, prompts: list[tuple[int, ...]]) -> list[np.ndarray]:
    """The log probabilities of all tokens, at each position of the prompts."""
    found = []
    with reference(path, 512, logits_all=True, flash_attn=False) as llama:
        for prompt in prompts:
            llama.n_tokens = 0
            llama.eval(list(prompt))
            logits = llama.scores[: len(prompt)].astype(np.float64)
            found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    return found


async def ask(
    engine: Engine, name: str, prompt: tuple[int, ...], max_tokens: int
) -> list[TokenDelta]:
    sampling = SamplingParams(
        temperature=0, logprobs=3, prompt_logprobs=True, max_tokens=max_tokens
    )
    return [delta async for delta in engine.submit(GenerationRequest(name, prompt, sampling))]


async def test_they_are_llama_cpps(engine: Engine, path: Path) -> None:
    prompts = [engine.tokenize(text) for text in TEXTS]
    assert max(map(len, prompts)) > 64  # several batches
    expected = reference_logprobs(path, prompts)
    for i, (prompt, known) in enumerate(zip(prompts, expected, strict=True)):
        deltas = await ask(engine, f"a{i}", prompt, max_tokens=1)
        found = deltas[0].prompt_logprobs
        assert len(found) == len(prompt) - 1
        own = [known[at, token] for at, token in enumerate(prompt[1:])]
        assert [one.logprob for one in found] == pytest.approx(own, abs=0.01)
        for one, row in zip(found, known, strict=False):
            best = np.sort(row)[::-1][:3]
            assert [logprob for _, logprob in one.top] == pytest.approx(best, abs=0.01)
        (generated,) = deltas[0].logprobs
        assert generated.logprob == pytest.approx(float(known[-1].max()), abs=0.01)


async def test_without_an_answer_and_with_a_warm_cache_they_are_the_same(engine: Engine) -> None:
    prompt = engine.tokenize(TEXTS[1])
    (first, *_) = await ask(engine, "b", prompt, max_tokens=3)
    (again,) = await ask(engine, "c", prompt, max_tokens=0)
    assert again.token_ids == ()
    assert again.end is not None
    assert again.end.usage.cached_tokens == 0
    assert [one.logprob for one in again.prompt_logprobs] == pytest.approx(
        [one.logprob for one in first.prompt_logprobs], abs=0.01
    )
