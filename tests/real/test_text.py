"""Real models say with Corral what they say with llama.cpp, alone and beside others."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from loadtests.common.servers import is_healthy, running
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.requests import GenerationRequest
from serve_app.cli.measure import quality
from serve_app.engine import Engine
from serve_app.engine.stream import TokenStream
from serve_app.kernels.llama.model import Model
from tests.peers.conftest import server_binary
from tests.real.models import TEXT

N_PROMPTS, N_TOKENS = 40, 64
GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS)
MOST_PERPLEXITY = 1.01
"""The most that perplexity may grow."""
_ids = itertools.count()


def llama_servers_tokens(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """The tokens that llama-server generates for each prompt, one prompt after the other."""
    server = server_binary()

    def command(_: Path, port: int) -> list[str | Path]:
        options = (
            f"--port {port} --parallel 1 --ctx-size 1024 --threads 2 --no-warmup --cache-ram 0"
            # A checkpoint divides the prompt's last batch, and the parts round otherwise.
            " --ctx-checkpoints 0"
        )
        return [server, "--model", model, *options.split()]

    body = {"n_predict": N_TOKENS, "temperature": 0, "cache_prompt": False, "return_tokens": True}
    with running(command, is_healthy) as peer:
        answers = [
            httpx.post(f"{peer.url}/completion", json=body | {"prompt": text}, timeout=300)
            for text in texts
        ]
    return [answer.json()["tokens"] for answer in answers]


def prompts() -> list[str]:
    """Beginnings of different lengths, each at another place of the text."""
    words = TEXT.split()
    return [
        " ".join(words[20 * number : 20 * number + 12 + 2 * (number % 10)])
        for number in range(N_PROMPTS)
    ]


async def ask(
    engine: Engine, tokens: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY
) -> list[tuple[int, ...]]:
    """The tokens that the engine generates for each prompt; all are submitted together, and share
    nothing: a cached beginning divides the prompt, which rounds otherwise, if only by a token."""
    labels = [f"r{next(_ids)}" for _ in tokens]
    requests = [
        GenerationRequest(label, tuple(prompt), sampling, cache_group=label)
        for label, prompt in zip(labels, tokens, strict=True)
    ]
    streams = engine.submit_many(requests)
    return await asyncio.gather(*(_read(stream) for stream in streams))


async def _read(stream: object) -> tuple[int, ...]:
    assert isinstance(stream, TokenStream), stream
    return tuple([token async for delta in stream for token in delta.token_ids])


async def logprobs_of(engine: Engine, model: Path) -> list[float]:
    """The engine's logarithms of the probabilities of the text's tokens, all windows at once: those that
    `quality.read_windows` takes."""
    vocabulary = Model(model, vocab_only=True)
    tokens = vocabulary.tokenize(TEXT, add_special=False, parse_special=False)
    first = vocabulary.tokenize("", add_special=True, parse_special=False)[:1]
    windows = quality.split(tokens, first)
    sampling = SamplingParams(temperature=0, max_tokens=0, logprobs=0, prompt_logprobs=True)
    streams = engine.submit_many(
        [GenerationRequest(f"r{next(_ids)}", tuple(window), sampling) for window in windows]
    )

    async def likelihood(stream: object) -> list[float]:
        assert isinstance(stream, TokenStream), stream
        logprobs = [item.logprob async for delta in stream for item in delta.prompt_logprobs]
        assert len(logprobs) == quality.WINDOW - 1
        return logprobs[quality.WINDOW // 2 :]

    second_halves = await asyncio.gather(*map(likelihood, streams))
    return list(itertools.chain(*second_halves))


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


async def test_greedy_text_is_llama_servers(model: Path, load: Callable[..., Engine]) -> None:
    """One sequence at once, without checkpoints: the same kernels see the same rows."""
    texts = prompts()
    expected = llama_servers_tokens(model, texts)
    engine = load(n_slots=1, speculate=False, checkpoint_ram_bytes=0)
    different = []
    for text, theirs in zip(texts, expected, strict=True):
        (ours,) = await ask(engine, [engine.tokenize(text)])
        if list(ours)[: len(theirs)] != theirs[: len(ours)]:
            different.append((text, ours, theirs))
    assert different == []


async def test_sixteen_at_once_read_a_text_as_llama_cpp_alone(
    model: Path, load: Callable[..., Engine]
) -> None:
    alone = quality.read_windows(model, TEXT, n_windows=1000, threads=2).perplexity
    together = perplexity(await logprobs_of(load(), model))
    assert together == pytest.approx(alone, rel=MOST_PERPLEXITY - 1)
    print(f"{model.name}: perplexity {alone:.3f} alone, {together:.3f} beside fifteen others")
