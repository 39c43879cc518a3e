"""Formats of the KV cache and ways to load, on a real tiny model."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.engine import ConfigError, Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.engine.choice.choose import choose
from serve_app.engine.choice.plan import AS_STORED, REPACKED, Kernels, Plan
from serve_app.kernels.llama.context import Context, ContextOptions
from serve_app.kernels.llama.model import Model
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


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a format for which llama.cpp has kernels for both layouts of weights."""
    path = tmp_path_factory.mktemp("k-quants") / "model.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q4_k_m")
    return path


def logits(model: Model, n_rows: int, stored_from: int | None = None) -> NDArray[np.float32]:
    """The logits behind a prompt of so many tokens."""
    options = ContextOptions(
        n_seq_max=1, n_ctx_slot=256, n_batch=64, threads=1, flash_attn=True, stored_from=stored_from
    )
    with closing(Context(model, options)) as context:
        context.decode([(1 + i, i, 0, i == n_rows - 1) for i in range(n_rows)])
        return context.logits(n_rows - 1).copy()


def test_batches_of_many_rows_are_computed_over_weights_in_the_file(k_quants: Path) -> None:
    repacked, as_stored = (Model(k_quants, repack=repack) for repack in (True, False))
    both = Model(k_quants)
    few, many = (logits(both, n, stored_from=16) for n in (15, 16))
    assert both.stored is not None
    if not both.stored.n_bytes:
        pytest.skip("llama.cpp repacks nothing for this processor")
    assert (few == logits(repacked, 15)).all()
    assert (many == logits(as_stored, 16)).all()
    assert not (many == logits(repacked, 16)).all()
    assert (logits(both, 16) == logits(repacked, 16)).all(), "another context wants it repacked"


async def test_weights_of_k_quants_serve_repacked_and_as_they_are_stored(k_quants: Path) -> None:
    """All layouts say the same, but for rounding, and are compared."""
    path = k_quants
    texts, sampling = [], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options = EngineOptions(**OPTIONS, profile_limit_s=0)
    for kernels in (REPACKED, AS_STORED, Kernels(many_from=2)):
        opened = partial(LlamaBackend, path, options, plan=Plan(kernels))
        engine = Engine(opened, options)
        try:
            request = GenerationRequest("1", engine.tokenize("Hello there, how"), sampling)
            deltas = [delta async for delta in engine.submit(request)]
            texts.append([token for delta in deltas for token in delta.token_ids])
        finally:
            engine.close()
    assert texts[0][:1] == texts[1][:1] == texts[2][:1]
    plan = choose(path, EngineOptions(**OPTIONS, profile_limit_s=0.5))
    assert plan.kernels.backend == "llama.cpp"
    assert "a request with 1 and 2 at once takes " in plan.why


def test_what_llama_cpp_would_refuse_is_refused_before() -> None:
    with pytest.raises(ConfigError, match=r"needs engine\.flash_attn"):
        EngineOptions(**OPTIONS, flash_attn=False, cache_type_v="q8_0")
    assert EngineOptions(**OPTIONS, flash_attn=False, cache_type_k="q8_0")
