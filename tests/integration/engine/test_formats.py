"""Formats of the KV cache and ways to load, on a real tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.engine import ConfigError, Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.backends.layouts import chosen_layout
from serve_app.progress import nowhere
from tools.random_models.model import SHAPES, write_random_gguf

OPTIONS: dict[str, Any] = {"n_slots": 2, "n_ctx_slot": 256, "threads": 1, "n_batch": 64}
# Two layers, two heads of 64: 512 numbers for each of 256 cells.
NUMBERS = 512 * 256


async def tokens(engine: Engine) -> int:
    request = GenerationRequest(
        "1", engine.tokenize("Hello there, how"), SamplingParams(max_tokens=8, ignore_eos=True)
    )
    return sum([len(delta.token_ids) async for delta in engine.submit(request)])


@pytest.mark.parametrize(
    ("key", "value", "cache_bytes"),
    [
        ("f16", "f16", NUMBERS * 2),
        ("f32", "bf16", NUMBERS * 3),
        ("q8_0", "q8_0", NUMBERS * 34 // 32),
        ("q4_0", "iq4_nl", NUMBERS * 18 // 32),
        ("q5_1", "q5_0", NUMBERS * (24 + 22) // 64),
    ],
)
async def test_a_cache_of_any_format_serves(
    tiny_gguf: Path, key: Any, value: Any, cache_bytes: int
) -> None:
    options = EngineOptions(**OPTIONS, cache_type_k=key, cache_type_v=value)
    engine = Engine.load(tiny_gguf, options)
    try:
        assert await tokens(engine) == 8
        stats = engine.stats()
        assert stats.memory.cache_bytes_per_slot == cache_bytes
        assert stats.memory.cache_bytes == 2 * cache_bytes
        assert 1_000_000 < stats.memory.weights_bytes < 4_000_000
    finally:
        engine.close()


@pytest.mark.parametrize("load_mode", ["auto", "mmap", "mlock", "mmap+mlock", "none"])
async def test_every_load_mode_loads(tiny_gguf: Path, load_mode: Any) -> None:
    engine = Engine.load(tiny_gguf, EngineOptions(**OPTIONS, load_mode=load_mode))
    try:
        assert await tokens(engine) == 8
    finally:
        engine.close()


async def test_weights_of_k_quants_serve_repacked_and_as_they_are_stored(tmp_path: Path) -> None:
    """Both layouts say the same, but for rounding, and are compared."""
    path = tmp_path / "model.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q4_k_m")
    texts, sampling = [], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for repack in (True, False):
        engine = Engine.load(path, EngineOptions(**OPTIONS, repack=repack, profile_limit_s=0))
        try:
            request = GenerationRequest("1", engine.tokenize("Hello there, how"), sampling)
            deltas = [delta async for delta in engine.submit(request)]
            texts.append([token for delta in deltas for token in delta.token_ids])
        finally:
            engine.close()
    assert texts[0][:1] == texts[1][:1]
    choice = chosen_layout(path, EngineOptions(**OPTIONS, profile_limit_s=0.5), nowhere)
    assert "as stored to repacked, is" in choice.reason


def test_what_llama_cpp_would_refuse_is_refused_before() -> None:
    with pytest.raises(ConfigError, match=r"needs engine\.flash_attn"):
        EngineOptions(**OPTIONS, flash_attn=False, cache_type_v="q8_0")
    assert EngineOptions(**OPTIONS, flash_attn=False, cache_type_k="q8_0")
