"""Slots saved and restored with real llama.cpp: what is computed from them is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import TokenDelta
from serve_app.engine import Engine, EngineOptions, GenerationRequest, InvalidRequestError
from tests.integration.engine.kernels import openvino
from tools.random_models.model import SHAPES, write_random_gguf

PROMPT = tuple(range(300, 364))


def load(model: Path, folder: Path, *, slots: int = 2, **more: Any) -> Engine:
    options = EngineOptions(
        n_slots=slots,
        n_ctx_slot=256,
        threads=1,
        profile_limit_s=0,
        slot_folder=folder,
        **{"flash_attn": False, **more},
    )
    return Engine.load(model, options)


async def greedy(engine: Engine, name: str) -> tuple[str, TokenDelta]:
    deltas = []
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    async for delta in engine.submit(GenerationRequest(name, PROMPT, sampling)):
        deltas.append(delta)
    return "".join(delta.text for delta in deltas), deltas[-1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_random_gguf(path, SHAPES["tiny"], "q8_0")
    return path


@pytest.mark.parametrize("mode", [{"kv_unified": False}, {"kv_unified": True}, openvino()])
async def test_a_slot_survives_its_engine(
    model: Path, tmp_path: Path, mode: dict[str, Any]
) -> None:
    engine = load(model, tmp_path, **mode)
    try:
        text, _ = await greedy(engine, "a")
        (slot,) = [slot.id for slot in engine.stats().slots if slot.n_past]
        saved = engine.slot_files.save(slot, "a.bin")
    finally:
        engine.close()
    engine = load(model, tmp_path, **mode)
    try:
        assert engine.slot_files.restore(1, "a.bin").n_tokens == saved.n_tokens >= len(PROMPT)
        again, last = await greedy(engine, "b")
        assert again == text
        assert last.end is not None
        assert last.end.usage.cached_tokens == len(PROMPT) - 1
    finally:
        engine.close()


async def test_another_kind_of_cache_takes_a_file_and_another_format_does_not(
    model: Path, tmp_path: Path
) -> None:
    engine = load(model, tmp_path, kv_unified=False)
    try:
        await greedy(engine, "a")
        engine.slot_files.save(0, "a.bin")
    finally:
        engine.close()
    other = load(model, tmp_path, kv_unified=True)
    try:
        assert other.slot_files.restore(0, "a.bin").n_tokens > 0
    finally:
        other.close()
    other = load(model, tmp_path, kv_unified=True, cache_type_k="q8_0")
    try:
        with pytest.raises(InvalidRequestError, match="of another model, context or version"):
            other.slot_files.restore(0, "a.bin")
    finally:
        other.close()
