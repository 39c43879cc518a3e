"""Slots and context that fit a model and a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_app.base.errors import ConfigError
from serve_app.config.schema import EngineConfig
from serve_app.run.sizing import (
    NOTHING,
    UNKNOWN,
    ModelNeeds,
    Need,
    bound,
    divide,
    fitting_replicas,
    need,
    resolve,
    shares_of_memory,
)

GIB = 2**30
# The cache of Qwen3-0.6B: 28 layers x 8 heads x 128 elements, keys and values, 112 KiB a token as F16.
SMALL = ModelNeeds(32768, (28672, 28672), (128, 128), weight_bytes=GIB // 3)


@pytest.mark.parametrize(
    ("config", "cores", "memory", "expected"),
    [
        ({}, 2, 24 * GIB, (8, 4096)),
        ({}, 4, 24 * GIB, (16, 4096)),
        ({}, 64, 256 * GIB, (32, 4096)),
        ({}, 2, 4 * GIB, (8, 2145)),
        ({}, 2, 1 * GIB, (3, 1024)),
        ({}, 2, GIB // 4, (1, 1024)),
        ({"n_slots": 4}, 2, 2 * GIB, (4, 1950)),
        ({"n_ctx_slot": 8192, "kv_unified": False}, 2, 8 * GIB, (4, 8192)),
        ({"n_slots": 3, "n_ctx_slot": 99}, 2, 0, (3, 99)),
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 2, 4 * GIB, (8, 4038)),
        ({"system_prompts": ["a", "b"]}, 2, 4 * GIB, (8, 1716)),
    ],
    ids=[
        "roomy",
        "more cores",
        "32 at most",
        "context gives way first",
        "then slots",
        "never nothing",
        "slots set",
        "context set",
        "both set",
        "a quantised cache holds more",
        "pinned prompts have slots too",
    ],
)
def test_fits_machine(
    config: dict[str, Any], cores: int, memory: int, expected: tuple[int, int]
) -> None:
    options = resolve(EngineConfig.model_validate(config), SMALL, cores=cores, memory_bytes=memory)
    assert (options.n_slots, options.n_ctx_share) == expected
    assert options.threads == cores
    assert options.max_waiting == 2 * options.n_slots


def test_a_request_may_have_the_tokens_of_all_slots() -> None:
    """Of as much memory as slots of equal shares take; or of what the model was trained for."""
    options = resolve(EngineConfig(), SMALL, cores=2, memory_bytes=4 * GIB)
    assert (options.n_slots, options.n_ctx_share) == (8, 2145)
    assert options.n_ctx == options.n_ctx_slot == 8 * 2145
    options = resolve(EngineConfig(), SMALL, cores=8, memory_bytes=64 * GIB)
    assert (options.n_ctx, options.n_ctx_slot) == (32 * 4096, SMALL.n_ctx_train)
    options = resolve(EngineConfig(n_ctx=9000), SMALL, cores=2, memory_bytes=4 * GIB)
    assert (options.n_ctx, options.n_ctx_slot, options.n_ctx_share) == (9000, 9000, 1125)
    split = resolve(EngineConfig(kv_unified=False), SMALL, cores=2, memory_bytes=4 * GIB)
    assert (split.n_ctx, split.n_ctx_slot) == (None, 2145)


def test_context_is_never_longer_than_the_models() -> None:
    needs = ModelNeeds(512, (1, 1), (1, 1), weight_bytes=1)
    options = resolve(EngineConfig(), needs, cores=2, memory_bytes=GIB)
    assert options.n_ctx_slot == 512


# Gemma 3 1B's cache: 26 layers, of which 22 see 512 tokens, one head of 256.
WINDOWED = ModelNeeds(32768, (6656, 6656), (256, 256), GIB, window=512, window_share=22 / 26)
ENCODER = ModelNeeds(
    8192, (24576, 24576), (64, 64), weight_bytes=GIB // 2, is_encoder=True, makes_vectors=True
)


@pytest.mark.parametrize(
    ("fields", "memory_bytes", "n_ctx_slot"),
    [
        ({}, 16 * GIB, 8192),
        ({}, 3 * GIB // 2, 5181),  # half of the 1 GiB beside the weights has room for no more
        ({}, GIB // 2, 1024),
        ({"n_ctx_slot": 6000}, GIB, 6000),
        ({"n_ctx_slot": 9000}, 16 * GIB, 8192),
        ({"n_ctx": 6000}, 16 * GIB, 6000),
        ({"kv_unified": False}, 16 * GIB, 8192),
        ({"n_slots": 1}, 16 * GIB, 8192),
    ],
)
def test_an_encoder_takes_texts_as_long_as_it_was_trained_for(
    fields: dict[str, Any], memory_bytes: int, n_ctx_slot: int
) -> None:
    options = resolve(EngineConfig(**fields), ENCODER, cores=2, memory_bytes=memory_bytes)
    assert options.n_ctx_slot == n_ctx_slot


def test_an_encoder_keeps_no_prefixes() -> None:
    options = resolve(EngineConfig(), ENCODER, cores=2, memory_bytes=16 * GIB)
    assert (options.cache_ram_bytes, options.checkpoint_ram_bytes) == (0, 0)


def test_an_encoder_needs_its_weights_and_room_for_the_longest_text() -> None:
    """A process takes half a GiB beside, and OpenVINO may hold weights twice as large."""
    n_bytes, grows = need(EngineConfig(), ENCODER, cores=2)
    assert (n_bytes, grows) == (GIB + GIB // 2 + 40 * 8192**2, False)
    assert need(EngineConfig(n_slots=32), ENCODER, cores=64) == (n_bytes, False)
    options = resolve(EngineConfig(), ENCODER, cores=2, memory_bytes=int(n_bytes))
    assert options.n_ctx_slot == 8192
    (short, _), (two, _) = (
        need(EngineConfig(n_ctx_slot=512), ENCODER, cores=2),
        need(EngineConfig(), ENCODER, cores=2, n_replicas=2),
    )
    assert short == GIB + GIB // 2 + 40 * 512**2
    assert two == 2 * n_bytes
    mapped = replace(ENCODER, mapped=True)
    assert need(EngineConfig(), mapped, cores=2, n_replicas=2)[0] == two + mapped.weight_bytes


@pytest.mark.parametrize("n_replicas", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"n_slots": 4},
        {"n_ctx_slot": 8192},
        {"n_ctx_slot": 8192, "kv_unified": False},
        {"n_ctx": 9000},
        {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
        {"system_prompts": ["a", "b"]},
    ],
    ids=str,
)
def test_a_chat_model_needs_what_lowers_nothing(config: dict[str, Any], n_replicas: int) -> None:
    for needs in (SMALL, WINDOWED, replace(SMALL, makes_vectors=True), replace(SMALL, mapped=True)):
        engine = EngineConfig.model_validate(config)
        n_bytes, grows = need(engine, needs, cores=4, n_replicas=n_replicas)
        assert grows
        enough, plenty = (
            resolve(engine, needs, cores=4, memory_bytes=memory, n_replicas=n_replicas)
            for memory in (int(n_bytes), 2**50)
        )
        assert (enough.n_slots, enough.n_ctx, enough.n_ctx_slot) == (
            *(plenty.n_slots, plenty.n_ctx),
            plenty.n_ctx_slot,
        )


@pytest.mark.parametrize(
    ("needs", "parts"),
    [
        ([(9, True)], [100]),
        ([(900, True)], [100]),
        ([(9, False)], [9]),
        ([(9, True), (9, True)], [50, 50]),
        ([(60, True), (70, True)], [50, 50]),
        ([(20, False), (10, True)], [20, 80]),
        ([(20, False), (900, True)], [20, 80]),
        ([(90, False), (900, True)], [50, 50]),
        ([(10, True), (900, True)], [10, 90]),
        ([(10, True), (20, True)], [45, 55]),
        ([UNKNOWN, UNKNOWN, (10, False)], [45, 45, 10]),
        ([UNKNOWN, (10, True)], [70, 30]),
        ([UNKNOWN, (900, True)], [50, 50]),
        ([NOTHING, (30, True), NOTHING], [0, 100, 0]),
        ([], []),
    ],
)
def test_memory_is_divided_by_need(needs: list[Need], parts: list[int]) -> None:
    assert divide(100, needs) == parts


def test_a_long_text_has_as_much_memory_as_the_slots() -> None:
    """Where the model makes vectors, and memory is scarce."""
    options = resolve(EngineConfig(), SMALL, cores=2, memory_bytes=4 * GIB)
    makes_vectors = replace(SMALL, makes_vectors=True)
    halved = resolve(EngineConfig(), makes_vectors, cores=2, memory_bytes=4 * GIB)
    assert halved.n_ctx == pytest.approx((options.n_ctx or 0) / 2, rel=0.01)


def test_without_a_model_both_sizes_must_be_set() -> None:
    with pytest.raises(ConfigError, match=r"engine\.n_slots and engine\.n_ctx_slot"):
        resolve(EngineConfig(n_slots=4), None, cores=2, memory_bytes=GIB)


def test_a_format_must_divide_the_heads() -> None:
    odd = ModelNeeds(512, (80, 80), (80, 80), weight_bytes=1)
    config = EngineConfig(cache_type_v="q8_0")
    with pytest.raises(ConfigError, match=r"cache_type_v: q8_0 packs 32 .* heads of 80"):
        resolve(config, odd, cores=2, memory_bytes=GIB)


def test_quantised_values_need_flash_attention() -> None:
    config = EngineConfig(cache_type_v="q4_0", flash_attn=False)
    with pytest.raises(ConfigError, match=r"cache_type_v: q4_0 needs engine\.flash_attn"):
        resolve(config, SMALL, cores=2, memory_bytes=GIB)


@pytest.mark.parametrize(
    ("config", "memory", "expected"),
    [
        ({"n_ctx_slot": 8192}, 8, (8, 8192, 35888)),
        ({"n_ctx_slot": 32768}, 8, (8, 32768, 35888)),
        ({"n_ctx_slot": 32768}, 64, (8, 32768, None)),
        ({"n_ctx_slot": 32768}, 2, (1, 32768, None)),
        ({"n_ctx_slot": 32768, "n_slots": 2}, 8, (2, 32768, None)),
        ({"n_ctx_slot": 32768}, 5, (1, 32768, None)),
        ({"n_ctx_slot": 4096}, 2, (1, 4096, None)),
        ({"n_ctx_slot": 8192, "n_ctx": 9000}, 8, (8, 8192, 9000)),
        ({}, 8, (8, 32768, 32768)),
    ],
    ids=[
        "shared",
        "one long one",
        "room for all",
        "no room",
        "slots set",
        "short",
        "short context",
        "all set",
        "default",
    ],
)
def test_slots_share_what_memory_has_for_a_long_context(
    config: dict[str, Any], memory: int, expected: tuple[int, int, int | None]
) -> None:
    needs = EngineConfig.model_validate(config)
    options = resolve(needs, SMALL, cores=2, memory_bytes=memory * GIB)
    assert (options.n_slots, options.n_ctx_slot, options.n_ctx) == expected


@pytest.mark.parametrize(
    ("config", "memory", "expected"),
    [
        ({}, 2 * GIB, (8, 4096)),
        ({"n_slots": 4, "n_batch": 256}, GIB + 2**27, (4, 1024)),
        ({"n_ctx_slot": 32768, "kv_unified": False}, 2 * GIB, (3, 32768)),
        ({"n_slots": 8}, GIB + 2**29, (8, 2560)),
        ({"n_ctx": 8192}, GIB, (8, 1024)),
    ],
)
def test_layers_with_a_window_take_no_more_than_that_and_a_batch(
    config: dict[str, Any], memory: int, expected: tuple[int, int]
) -> None:
    options = resolve(EngineConfig.model_validate(config), WINDOWED, cores=2, memory_bytes=memory)
    assert (options.n_slots, options.n_ctx_share) == expected


def test_memory_for_checkpoints() -> None:
    needs = ModelNeeds(512, (1, 1), (1, 1), weight_bytes=4 * GIB)
    options = resolve(EngineConfig(), needs, cores=2, memory_bytes=8 * GIB)
    assert options.checkpoint_ram_bytes == GIB // 4


@pytest.mark.parametrize(("mib", "expected"), [(None, GIB // 2), (0, 0), (100, 100 * 2**20)])
def test_memory_for_prefixes_without_a_slot(mib: int | None, expected: int) -> None:
    needs = ModelNeeds(512, (1, 1), (1, 1), weight_bytes=4 * GIB)
    config = EngineConfig(cache_ram_mib=mib)
    assert resolve(config, needs, cores=2, memory_bytes=8 * GIB).cache_ram_bytes == expected


F16 = replace(SMALL, weight_bytes=2 * GIB, mapped=True)
PACKED = replace(F16, mapped=False)


@pytest.mark.parametrize(
    ("needs", "load_mode", "left"),
    [(F16, "auto", 22 / 3), (F16, "none", 6), (PACKED, "auto", 6), (PACKED, "none", 6)],
    ids=["mapped: once for all", "read by each", "packed by each", "both"],
)
def test_replicas_divide_the_memory(needs: ModelNeeds, load_mode: str, left: float) -> None:
    config = EngineConfig.model_validate({"load_mode": load_mode, "n_ctx_slot": 4096})
    options = resolve(config, needs, cores=16, memory_bytes=24 * GIB, n_replicas=3)
    assert options.n_slots == int(left * GIB / 2) // (112 * 1024) // 4096
    assert options.cache_ram_bytes == int(left * GIB / 8)


@pytest.mark.parametrize(
    ("needs", "config", "memory", "expected"),
    [
        (PACKED, {}, 64 * GIB, 4),
        (PACKED, {}, 7 * GIB, 2),
        (F16, {}, 7 * GIB, 3),
        (PACKED, {"n_slots": 32, "n_ctx_slot": 4096}, 64 * GIB, 3),
        (PACKED, {"n_slots": 32, "n_ctx_slot": 4096, "n_ctx": 8192}, 64 * GIB, 4),
        (PACKED, {}, 0, 1),
    ],
    ids=["roomy", "weights for each", "weights once", "as configured", "a small cache", "nothing"],
)
def test_replicas_that_memory_has_room_for(
    needs: ModelNeeds, config: dict[str, Any], memory: int, expected: int
) -> None:
    assert fitting_replicas(EngineConfig.model_validate(config), needs, 4, memory) == expected


@pytest.mark.parametrize(
    ("config", "node_bytes", "expected"),
    [
        (EngineConfig(n_slots=4, n_ctx_slot=1024), 32 * GIB, (2 * GIB, GIB)),
        (EngineConfig(n_slots=4, n_ctx_slot=1024), 8 * GIB, (GIB, GIB // 2)),
        (EngineConfig(n_slots=4, n_ctx_slot=1024, cache_ram_mib=4096), GIB, (4 * GIB, GIB // 16)),
        (EngineConfig(n_slots=4, n_ctx_slot=1024, cache_ram_mib=0), GIB, (0, GIB // 16)),
    ],
)
def test_a_small_node_bounds_the_shares_of_a_large_head(
    config: EngineConfig, node_bytes: int, expected: tuple[int, int]
) -> None:
    """What is configured stays; the head has 16 GiB."""
    options = resolve(config, None, cores=4, memory_bytes=16 * GIB)
    here = bound(options, shares_of_memory(config), node_bytes)
    assert (here.cache_ram_bytes, here.checkpoint_ram_bytes) == expected


def test_a_node_that_the_weights_fill_keeps_no_prefixes() -> None:
    config = EngineConfig(n_slots=4, n_ctx_slot=1024)
    options = resolve(config, None, cores=4, memory_bytes=16 * GIB)
    here = bound(options, shares_of_memory(config), -1)
    assert (here.cache_ram_bytes, here.checkpoint_ram_bytes) == (0, 0)
