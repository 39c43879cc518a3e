"""`engine.backend: auto` with real models: both backends are measured, each in a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.builtin_model import BUILTIN_MODEL
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from serve_app.engine.backends.choice import chosen, measured
from serve_app.errors import ConfigError
from serve_app.progress import Stage
from tests.integration.models.forgetful_models import FORGETFUL
from tests.integration.openvino.random_models import Made

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

OPTIONS = EngineOptions(
    n_slots=4, n_ctx_slot=256, threads=2, n_batch=64, profile_limit_s=1.0, backend="auto"
)


async def say(engine: Engine, name: str) -> list[int]:
    prompt = engine.tokenize("What is the capital of France?")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    async with engine.submit(GenerationRequest(name, prompt, params)) as stream:
        return [token async for delta in stream for token in delta.token_ids]


def test_the_one_that_was_measured_to_be_faster_answers(tmp_path: Path) -> None:
    engine = Engine.load(BUILTIN_MODEL, replace(OPTIONS, profile_folder=tmp_path))
    try:
        stats = engine.stats()
        assert stats.compute.backend in ("llama.cpp", "openvino")
        assert "measured: the time of a request" in stats.compute.backend_reason
        assert stats.costs.step_time["decode_ms"]
        assert len(asyncio.run(say(engine, "one"))) == 8
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["llama.cpp", "openvino"])
def test_each_is_measured_in_a_process_of_its_own(name: str) -> None:
    patient = replace(OPTIONS, profile_limit_s=5.0)  # other programs may take most of the processor
    found = measured(name, BUILTIN_MODEL, patient)  # type: ignore[arg-type]
    assert found.mode.paged == (name == "openvino")
    assert {1, 4} <= set(found.profile.decode_s)
    assert all(seconds > 0 for seconds in found.profile.prefill_s.values())


def test_a_model_with_experts_is_llama_cpps_without_a_measurement(tmp_path: Path) -> None:
    path = Made("qwen3moe").write(tmp_path / "model.gguf")
    stages: list[Stage] = []
    choice = chosen(path, replace(OPTIONS, profile_folder=tmp_path), stages.append)
    assert choice.name == "llama.cpp"
    assert "experts" in choice.reason
    assert stages == []


def test_a_model_that_openvino_cannot_serve_is_llama_cpps(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    next(iter(FORGETFUL.values()))(path)
    with pytest.raises(ConfigError, match="cannot serve"):
        measured("openvino", path, OPTIONS)
    engine = Engine.load(path, replace(OPTIONS, profile_folder=tmp_path))
    try:
        assert engine.stats().compute.backend == "llama.cpp"
        assert "OpenVINO cannot serve it" in engine.stats().compute.backend_reason
    finally:
        engine.close()
    assert chosen(path, replace(OPTIONS, profile_folder=tmp_path)).name == "llama.cpp"
