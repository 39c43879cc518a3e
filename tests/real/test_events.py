"""Real models give the same answers whatever happened to a sequence, and with OpenVINO's kernels."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.base.sampling import SamplingParams
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine import Engine
from serve_app.engine.stream import TokenStream
from tests.real.models import TEXT

N_PROMPTS, N_TOKENS = 40, 16
SAMPLING = SamplingParams(temperature=0, max_tokens=N_TOKENS, logprobs=1, ignore_eos=True)
LEAST_SAME = 0.95
"""The part of the prompts whose first token is the same, at least."""
MOST_APART = 0.1
"""The mean difference of two log-probabilities of the same token behind the same text, at most."""
_ids = itertools.count()
Answer = list[tuple[int, float]]
"""The tokens of an answer, with their log-probabilities."""


def requests(engine: Engine, n_words: int = 40) -> list[GenerationRequest]:
    words = TEXT.split()
    texts = (" ".join(words[15 * at : 15 * at + n_words]) for at in range(N_PROMPTS))
    return [GenerationRequest(f"e{next(_ids)}", engine.tokenize(text), SAMPLING) for text in texts]


async def read(stream: object) -> Answer:
    assert isinstance(stream, TokenStream), stream
    return [
        (token, item.logprob)
        async for delta in stream
        for token, item in zip(delta.token_ids, delta.logprobs, strict=False)
    ]


async def answer(engine: Engine, request: GenerationRequest) -> Answer:
    return await read(engine.submit(replace(request, id=f"e{next(_ids)}")))


async def together(engine: Engine, asked: Sequence[GenerationRequest]) -> list[Answer]:
    streams = engine.submit_many([replace(one, id=f"e{next(_ids)}") for one in asked])
    return await asyncio.gather(*map(read, streams))


def compare(
    expected: Sequence[Answer],
    answers: Sequence[Answer],
    n_tokens: int = N_TOKENS,
    least_alike: float = 0.4,
) -> None:
    """Almost all first tokens are the same, and the log-probabilities of tokens behind the same text."""
    apart = []
    for ours, theirs in zip(answers, expected, strict=True):
        assert len(ours) == len(theirs) == n_tokens
        for (token, logprob), (other, other_logprob) in zip(ours, theirs, strict=True):
            if token != other:
                break
            apart.append(abs(logprob - other_logprob))
    n_same = sum(ours[0][0] == theirs[0][0] for ours, theirs in zip(answers, expected, strict=True))
    print(f"{n_same} first tokens of {len(expected)} are the same, {len(apart)} tokens in all,")
    print(f"log-probabilities are {sum(apart) / len(apart):.4f} apart, {max(apart):.3f} at most")
    assert n_same >= LEAST_SAME * len(expected)
    assert sum(apart) / len(apart) <= MOST_APART
    assert len(apart) >= len(expected) * n_tokens * least_alike


@pytest.fixture
async def expected(load: Callable[..., Engine]) -> list[Answer]:
    engine = load(n_slots=1, speculate=False)
    return [await answer(engine, request) for request in requests(engine)]


async def test_beside_fifteen_others(load: Callable[..., Engine], expected: list[Answer]) -> None:
    engine = load()
    compare(expected, await together(engine, requests(engine)))


async def test_with_openvino(load: Callable[..., Engine], expected: list[Answer]) -> None:
    engine = load(backend="openvino")
    assert engine.stats().compute.backend == "openvino"
    compare(expected, await together(engine, requests(engine)))


async def test_after_preemption(load: Callable[..., Engine], expected: list[Answer]) -> None:
    """Sequences lose their slot for want of cells, and are computed again."""
    engine = load(n_ctx_slot=256, n_ctx=512, kv_unified=True, speculate=False)
    compare(expected, await together(engine, requests(engine)))
    assert engine.stats().requests.preemptions > 0


async def test_after_save_and_restore(
    load: Callable[..., Engine], expected: list[Answer], tmp_path: Path
) -> None:
    engine = load(n_slots=1, speculate=False, slot_folder=tmp_path)
    asked = requests(engine)
    answers = []
    for request in asked:
        await answer(engine, replace(request, sampling=replace(SAMPLING, max_tokens=1)))
        engine.slot_files.save(0, "slot")
        await answer(engine, asked[-1])
        engine.slot_files.restore(0, "slot")
        answers.append(await answer(engine, request))
    compare(expected, answers)


async def test_after_failover(load: Callable[..., Engine], expected: list[Answer]) -> None:
    """Another engine goes on from the tokens that the first one gave."""
    n_given = N_TOKENS // 2
    engine = load()
    asked = [
        replace(request, generated=tuple(token for token, _ in begun[:n_given]))
        for request, begun in zip(requests(engine), expected, strict=True)
    ]
    answers = [given[-n_given:] for given in await together(engine, asked)]
    compare([given[n_given:] for given in expected], answers, n_given)


async def test_a_chat_that_comes_back(model: Path, load: Callable[..., Engine]) -> None:
    """A long text that lost its slot to others goes on as if it had never been away: its window is
    restored from a checkpoint, and little is computed again."""
    words = TEXT.split()
    engine = load(n_slots=1, n_ctx_slot=2048, cache_ram_bytes=2**28, speculate=False)
    long = engine.tokenize(" ".join(words[:900]))
    other = engine.tokenize(" ".join(words[-700:]))
    more = engine.tokenize(" ".join(words[900:930]))
    first = await answer(engine, GenerationRequest("a", long, SAMPLING))
    await answer(engine, GenerationRequest("b", other, SAMPLING))
    prompt = (*long, *(token for token, _ in first), *more)
    before = engine.stats().tokens.prompt_tokens
    back = await answer(engine, GenerationRequest("c", prompt, SAMPLING))
    computed = engine.stats().tokens.prompt_tokens - before
    fresh = load(n_slots=1, n_ctx_slot=2048, speculate=False)
    alone = await answer(fresh, GenerationRequest("d", prompt, SAMPLING))
    compare([alone], [back], least_alike=1 / N_TOKENS)
    assert computed < 200 < len(long), model.name
