"""Engines that share the cores of a machine in turns, with llama.cpp and a tiny model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from tests.integration.engine.opening import opener
from tools.random_models.model import SHAPES, write_random_gguf

HELLO = "Hello there, how are you?"
OPTIONS = EngineOptions(4, 256, 2, flash_attn=True, kv_unified=False, profile_limit_s=0.2)
opened = opener(OPTIONS)


@pytest.fixture(scope="module")
def exact_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits do not depend on the batch."""
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


async def answer(engine: Engine, name: str, *, background: bool = False) -> str:
    sampling = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    request = GenerationRequest(
        f"{name} {background}", engine.tokenize(f"{name}. {HELLO}"), sampling, background=background
    )
    return "".join([delta.text async for delta in engine.submit(request)])


async def test_two_engines_stream_together_and_texts_are_embedded_beside_them(
    exact_gguf: Path, tmp_path: Path
) -> None:
    """All have their turns, and each answer is what it is without others."""
    names = ["one", "two", "three", "four"]
    async with opened(exact_gguf) as alone:
        expected = [await answer(alone, name) for name in names]
    path = tmp_path / "turns" / "0-1"
    async with opened(exact_gguf, turns=path) as first, opened(exact_gguf, turns=path) as second:
        texts = [second.tokenize(HELLO)] * 40
        answers = [answer(engine, name) for engine in (first, second) for name in names]
        vectors = asyncio.wrap_future(second.embed(texts, "another"))
        background = answer(first, "one", background=True)
        *streamed, rows, last = await asyncio.gather(*answers, vectors, background)
        assert streamed == [*expected, *expected]
        assert last == expected[0]
        assert len(rows) == 40
        for engine in (first, second):
            timing = engine.stats().timing
            assert timing.turn_s > 0
            assert timing.turn_wait_s > 0
            assert timing.turn_s + timing.turn_wait_s >= timing.decode_s
    assert len(list(path.parent.iterdir())) == 1


async def test_a_model_is_loaded_while_another_one_streams(
    exact_gguf: Path, tmp_path: Path
) -> None:
    """Its weights, and what is measured of it, take turns with the stream."""
    path = tmp_path / "turns" / "0-1"
    async with opened(exact_gguf) as alone:
        expected = [await answer(alone, name) for name in ("one", "two")]
    async with opened(exact_gguf, turns=path) as first:
        streams = [asyncio.create_task(answer(first, name)) for name in ("one", "two")]
        options = replace(OPTIONS, turns=path)
        second = await asyncio.to_thread(Engine.load, exact_gguf, options)
        try:
            assert [await stream for stream in streams] == expected
            assert await answer(second, "one") == expected[0]
        finally:
            second.close()
