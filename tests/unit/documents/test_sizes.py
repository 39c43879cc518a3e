"""What docs/models.md says of its example holds by the code that sizes replicas."""

from __future__ import annotations

from dataclasses import replace

from serve_app.config.schema import EngineConfig
from serve_app.run.sizing import CacheNeeds, resolve
from tests.documents.sizes import REASONING_TOKENS, SHAPES, SYSTEM_BYTES, people

(FOUR_B,) = (shape for shape in SHAPES if shape.name == "Qwen3 4B")
MEMORY = 16 * 2**30 - SYSTEM_BYTES


def test_the_example_fits_its_machine() -> None:
    """Ten slots on 4 cores and 16 GiB would get 4096 tokens without being told."""
    options = resolve(EngineConfig(n_slots=10), FOUR_B.needs, cores=4, memory_bytes=MEMORY)
    assert (options.n_slots, options.n_ctx_share) == (10, 4096)
    cache = CacheNeeds.of(EngineConfig(), FOUR_B.needs)
    assert round(cache.n_bytes(10, 10 * 4096) / 1e9, 1) == 6.0
    assert FOUR_B.needs.cache_bytes_per_token("f16", "f16") == 147_456


def test_people_follow_the_speed() -> None:
    assert people(FOUR_B, 4, REASONING_TOKENS) < 10 <= people(FOUR_B, 4)
    assert people(FOUR_B, 8) >= 2 * people(FOUR_B, 4)
    dense = sorted(
        (shape for shape in SHAPES if not shape.measured), key=lambda shape: shape.active_parameters
    )
    slower = [people(shape, 16) for shape in dense]
    assert slower == sorted(slower, reverse=True)


def test_experts_are_slower_for_prompts_than_their_parameters_say() -> None:
    """Published figures for 16 cores are near 210 tokens/s of prompts."""
    (experts,) = (shape for shape in SHAPES if shape.measured)
    assert experts.speeds(16).prefill < replace(experts, measured=None).speeds(16).prefill * 0.6
