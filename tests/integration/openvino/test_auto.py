"""`engine.backend: auto` with real models: both backends are measured, each in a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.base.progress import Stage
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.choice import choose
from serve_app.store.builtin_model import BUILTIN_MODEL
from tests.integration.models.forgetful_models import FORGETFUL

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

OPTIONS = EngineOptions(
    n_slots=4, n_ctx_slot=256, threads=2, n_batch=64, profile_limit_s=1.0, backend="auto"
)


async def say(engine: Engine, name: str) -> list[int]:
    prompt = engine.tokenize("What is the capital of France?")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async with engine.submit(GenerationRequest(name, prompt, params)) as stream:
        return [token async for delta in stream for token in delta.token_ids]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where converted models are kept, and small models are worth a measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choose, "_LEAST_BYTES", 0)


def test_the_one_that_was_measured_to_be_faster_answers(tmp_path: Path) -> None:
    stages: list[Stage] = []
    options = replace(OPTIONS, profile_folder=tmp_path)
    engine = Engine.load(BUILTIN_MODEL, options, stages.append)
    try:
        stats = engine.stats()
        assert stats.compute.backend in ("llama.cpp", "openvino")
        assert "a request with 1 and 4 at once takes " in stats.compute.backend_reason
        assert stats.costs.step_time["decode_ms"]
        assert len(asyncio.run(say(engine, "one"))) == 8
    finally:
        engine.close()
    assert any(stage.name == "converting" and stage.done > 0 for stage in stages)
    assert Stage("measuring", limit_s=1.0) in stages


def test_a_model_that_openvino_cannot_serve_is_llama_cpps(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    next(iter(FORGETFUL.values()))(path)
    options = replace(OPTIONS, profile_folder=tmp_path)
    engine = Engine.load(path, options)
    try:
        assert engine.stats().compute.backend == "llama.cpp"
        assert "openvino cannot compute" in engine.stats().compute.backend_reason
    finally:
        engine.close()
