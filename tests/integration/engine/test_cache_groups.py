"""Cache groups, on a real tiny model: others' prefixes are no prefixes, and change no text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams, TokenStream
from tests.integration.engine.kernels import openvino
from tests.integration.engine.opening import opener
from tools.random_models.model import SHAPES, write_random_gguf

# Without flash attention, logits do not depend on how a prompt was cut; with Q8_0, nor on the batch.
OPTIONS = EngineOptions(
    profile_limit_s=0,
    n_slots=2,
    n_ctx_slot=256,
    threads=1,
    n_batch=64,
    flash_attn=False,
    kv_unified=False,
)
SYSTEM = "You are a patient assistant who answers every question of every guest in this house. "
STORY = (
    "The letter that nobody but its reader should know about says that the key is under the mat. "
)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
MODES: list[Any] = [
    {},
    {"kv_unified": True},
    {"n_slots": 1, "cache_ram_bytes": 2**26},
    {"n_slots": 4, "cache_ram_bytes": 2**26},
    openvino(),
    openvino(n_slots=1, cache_ram_bytes=2**26),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


opened = opener(OPTIONS)


async def read(stream: object) -> tuple[list[int], int]:
    """The tokens that follow, and the prompt's cached ones."""
    assert isinstance(stream, TokenStream), stream
    deltas = [delta async for delta in stream]
    assert deltas[-1].end is not None
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[-1].end.usage.cached_tokens


async def tell(engine: Engine, prompt: str, group: str) -> tuple[list[int], int]:
    request = GenerationRequest(group, engine.tokenize(prompt), GREEDY, cache_group=group)
    return await read(engine.submit(request))


@pytest.mark.parametrize("mode", MODES, ids=str)
async def test_one_cache_group_after_the_other(path: Path, mode: dict[str, Any]) -> None:
    async with opened(path, **mode) as engine:
        said, cached = await tell(engine, STORY + "It", "mine")
        assert cached == 0
        for group in ("theirs", ""):
            assert await tell(engine, STORY + "It", group) == (said, 0)
            again, cached = await tell(engine, STORY + "It", group)
            assert again == said
            assert cached == len(engine.tokenize(STORY + "It")) - 1


@pytest.mark.parametrize("mode", MODES, ids=str)
async def test_cache_groups_beside_each_other(path: Path, mode: dict[str, Any]) -> None:
    async with opened(path, **mode | {"n_slots": 4}) as engine:
        said, _ = await tell(engine, STORY + "It", "alone")
        prompt = engine.tokenize(STORY + "It")
        groups = ["mine", "theirs", "mine", "theirs"]
        streams = engine.submit_many(
            [
                GenerationRequest(f"{i}", prompt, GREEDY, cache_group=group)
                for i, group in enumerate(groups)
            ]
        )
        found = await asyncio.gather(*map(read, streams))
    assert [tokens for tokens, _ in found] == [said] * 4
    assert [cached > 0 for _, cached in found] == [False, False, True, True]


@pytest.mark.parametrize("mode", [{}, openvino()], ids=str)
async def test_pinned_prompts_are_for_all(path: Path, mode: dict[str, Any]) -> None:
    async with opened(path, **mode) as engine:
        pinned = engine.tokenize(SYSTEM)
        said, cached = await tell(engine, SYSTEM + STORY, "mine")
        assert cached == 0
    async with opened(path, pinned=(pinned,), **mode) as engine:
        n_shared = sum(
            a == b for a, b in zip(pinned, engine.tokenize(SYSTEM + STORY), strict=False)
        )
        for group in ("mine", "theirs", ""):
            assert await tell(engine, SYSTEM + STORY, group) == (said, n_shared)


@pytest.mark.parametrize("mode", [{}, openvino()], ids=str)
async def test_a_restart_keeps_cache_groups(
    path: Path, tmp_path: Path, mode: dict[str, Any]
) -> None:
    kept = {"n_slots": 1, "cache_ram_bytes": 2**26, "prefix_folder": tmp_path, **mode}
    async with opened(path, **kept) as engine:
        said, _ = await tell(engine, STORY + "It", "mine")
    async with opened(path, **kept) as engine:
        assert await tell(engine, STORY + "It", "theirs") == (said, 0)
        again, cached = await tell(engine, STORY + "It", "mine")
        assert again == said
        assert cached == len(engine.tokenize(STORY + "It")) - 1


@pytest.mark.parametrize("mode", [{}, openvino()], ids=str)
async def test_a_transferred_prefix_stays_in_its_cache_group(
    path: Path, mode: dict[str, Any]
) -> None:
    async with opened(path, cache_ram_bytes=2**26, **mode) as source:
        for end in ("It", "He"):
            await tell(source, STORY + end, "mine")
        (hot,) = source.prefixes.offers(2)
        payload = source.prefixes.export_prefix(hot.prefix)
    assert payload is not None
    async with opened(path, cache_ram_bytes=2**26, **mode) as target:
        expected, _ = await tell(target, STORY + "We", "alone")
        assert target.prefixes.import_prefix(payload, len(hot.prefix.tokens) // 4) > 0
        assert await tell(target, STORY + "We", "theirs") == (expected, 0)
        said, cached = await tell(target, STORY + "We", "mine")
        assert said == expected
        assert cached > 20
