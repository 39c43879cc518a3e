"""Prefixes from one real engine to another."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.cache.transfers import Payload, RefusedPrefixError
from tests.integration.engine.kernels import openvino
from tests.integration.engine.opening import opener
from tools.random_models.model import SHAPES, write_random_gguf

# Without flash attention, logits do not depend on how a prompt was cut; with Q8_0, nor on the batch.
OPTIONS = EngineOptions(
    n_slots=2,
    n_ctx_slot=256,
    threads=1,
    n_batch=64,
    flash_attn=False,
    cache_ram_bytes=64 * 2**20,
    profile_limit_s=0,
)
SYSTEM = (
    "Everybody who asks here is told about the old house by the sea, at length and in the end. "
)
MODES: list[Any] = [
    {"kv_unified": kv_unified, **formats}
    for kv_unified in (False, True)
    for formats in ({}, {"cache_type_k": "q8_0"})
]
MODES.append(openvino())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "exact.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


async def tell(engine: Engine, prompt: str) -> tuple[list[int], int]:
    """The tokens that follow, and the prompt's cached ones."""
    sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    request = GenerationRequest(prompt, engine.tokenize(prompt), sampling)
    deltas = [delta async for delta in engine.submit(request)]
    assert deltas[-1].end is not None
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[-1].end.usage.cached_tokens


opened = opener(OPTIONS)


async def sent(path: Path, **changed: Any) -> tuple[Payload, int]:
    """What two prompts share, as another process gets it from an engine, and how many tokens that is."""
    async with opened(path, **changed) as source:
        for end in ("One", "Two"):
            await tell(source, SYSTEM + end)
        (hottest,) = source.prefixes.offers(2)
        payload: Payload = pickle.loads(
            pickle.dumps(source.prefixes.export_prefix(hottest.prefix), protocol=5)
        )
    return payload, len(hottest.prefix.tokens) // 4


@pytest.mark.parametrize("mode", MODES)
async def test_the_answer_is_the_same(path: Path, mode: dict[str, Any]) -> None:
    async with opened(path, **mode) as cold:
        expected, cached = await tell(cold, SYSTEM + "Six")
    assert cached == 0
    payload, n_shared = await sent(path, **mode)
    async with opened(path, **mode) as fresh:
        n_bytes = fresh.prefixes.import_prefix(payload, n_shared)
        assert 0 < n_bytes <= payload.state.size  # the answer is cut off, ...
        assert (
            n_bytes < payload.state.size or "backend" in mode
        )  # ... but for that of its last block
        assert await tell(fresh, SYSTEM + "Six") == (expected, n_shared)
        stats = fresh.stats()
    assert (stats.cache.received_prefixes, stats.cache.received_bytes) == (1, n_bytes)
    assert stats.tokens.restored_tokens == n_shared > 16


@pytest.mark.parametrize(
    "damage", [lambda state: state[: state.size // 2], lambda state: np.zeros(100, np.uint8)]
)
@pytest.mark.parametrize("mode", [{}, openvino()])
async def test_a_damaged_state_is_refused(
    path: Path, damage: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], mode: dict[str, Any]
) -> None:
    payload, n_shared = await sent(path, **mode)
    async with opened(path, **mode) as fresh:
        with pytest.raises(RefusedPrefixError, match=r"does not take back|cannot be used"):
            fresh.prefixes.import_prefix(replace(payload, state=damage(payload.state)), n_shared)
        _, cached = await tell(fresh, SYSTEM + "Six")
    assert cached == 0


@pytest.mark.parametrize("kind", [{"kv_unified": True}, {"flash_attn": True}])
async def test_another_kind_of_cache_takes_it(path: Path, kind: dict[str, Any]) -> None:
    payload, n_shared = await sent(path, kv_unified=False)
    async with opened(path, **{"kv_unified": False, **kind}) as fresh:
        assert fresh.prefixes.import_prefix(payload, n_shared) > 0
        _, cached = await tell(fresh, SYSTEM + "Six")
    assert cached == n_shared


@pytest.mark.parametrize("kind", [{"cache_type_k": "q8_0"}, openvino()])
async def test_another_format_or_backend_is_refused(path: Path, kind: dict[str, Any]) -> None:
    payload, n_shared = await sent(path)
    async with opened(path, **kind) as fresh:
        with pytest.raises(RefusedPrefixError, match="another model"):
            fresh.prefixes.import_prefix(payload, n_shared)
